"""Reading quotes that nobody vouches for: everything is a quote or a clear refusal."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darknight.errors import TrustError
from darknight.trust.quote import MAX_QUOTE_BYTES, SGX, SNP, TDX, read_quote
from trust.forge import DATA, REGISTERS, SGX_MEASUREMENT, SIGNER, TD_MEASUREMENT, Forger, body_of
from trust.foundry import CHIP, Foundry


@pytest.fixture(scope="module")
def quotes(tmp_path_factory):
    forger = Forger(tmp_path_factory.mktemp("root"))
    body = body_of(SGX, product=7, svn=3)
    report = Foundry().report(report_data=DATA, vmpl=1, svn=5, id_key=b"\x44" * 48)
    return {SGX: forger.quote(SGX, body=body), TDX: forger.quote(TDX), SNP: report}


def refuses(raw):
    with pytest.raises(TrustError, match="the quote cannot be read") as refusal:
        read_quote(raw)
    return refusal.value.check == "format"


def test_what_an_enclave_says(quotes):
    facts = read_quote(quotes[SGX])
    assert (facts.format, facts.version, facts.measurement, facts.signer) == (SGX, 3, SGX_MEASUREMENT, SIGNER)
    assert (facts.product, facts.svn, facts.report_data, facts.debug) == (7, 3, DATA, False)
    assert (facts.registers, facts.privilege, facts.chip) == ((), None, None)
    assert (facts.body, facts.size) == (range(48, 432), len(quotes[SGX]))


def test_what_a_td_says(quotes):
    facts = read_quote(quotes[TDX])
    assert (facts.format, facts.version, facts.measurement, facts.registers) == (TDX, 4, TD_MEASUREMENT, REGISTERS)
    assert (facts.signer, facts.product, facts.svn, facts.report_data, facts.debug) == (None, None, None, DATA, False)
    assert (facts.body, facts.size) == (range(48, 632), len(quotes[TDX]))


def test_what_a_guest_says(quotes):
    facts = read_quote(quotes[SNP])
    assert (facts.format, facts.version, facts.measurement, facts.signer) == (SNP, 3, b"\x11" * 48, b"\x44" * 48)
    assert (facts.svn, facts.report_data, facts.privilege, facts.chip) == (5, DATA, 1, CHIP)
    assert (facts.product, facts.debug, facts.size) == (None, False, 0x4A0)


@pytest.mark.parametrize("format", [SGX, TDX, SNP])
def test_every_truncation_is_refused(quotes, format):
    raw = quotes[format]
    assert all(refuses(raw[:size]) for size in range(len(raw)))


@pytest.mark.parametrize("version", [0, 1, 6, 7, 0x10003])
def test_versions_that_we_do_not_know(version):
    assert refuses(struct.pack("<I", version).ljust(0x4A0, b"\0"))


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 0xFFFF])
def test_bodies_without_bytes(kind):
    assert refuses(struct.pack("<HHI40xHI", 5, 2, 0x81, kind, 0).ljust(4096, b"\0"))


def test_a_report_is_neither_longer_nor_shorter(quotes):
    assert refuses(quotes[SNP] + b"\0")
    assert refuses(quotes[SNP][:-1])


def test_a_quote_is_not_endless(quotes):
    assert refuses(quotes[SGX] + bytes(MAX_QUOTE_BYTES))


@given(st.binary(max_size=2048))
def test_random_bytes_are_refused(raw):
    assert refuses(raw)


@settings(deadline=None)
@given(st.sampled_from([(3, 2, 0), (4, 2, 0x81), (5, 2, 0x81), (2, 0, 0), (3, 0, 0)]), st.binary(max_size=3000))
def test_random_bytes_behind_a_header_are_read_or_refused(start, rest):
    raw = struct.pack("<HHI", *start) + rest
    try:
        facts = read_quote(raw)
    except TrustError as error:
        assert error.check == "format"  # noqa: PT017 - either of two outcomes
    else:
        assert len(facts.report_data) == 64
        assert facts.size <= len(raw)
