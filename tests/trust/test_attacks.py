"""What a malicious host would send: Intel's formats with something wrong in them, signed where a host could sign."""

import json
import struct
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from darknight.errors import TrustError
from darknight.trust.evidence import MAX_COLLATERAL_BYTES, Evidence
from darknight.trust.quote import MAX_QUOTE_BYTES, SGX, TDX
from darknight.trust.simulated_authority import PCK, PROCESSOR, SIGNING
from darknight.trust.verify import judge
from trust.forge import DATA, NOW, REGISTERS, TD_MEASUREMENT, Forger, body_of, span, version_5


@pytest.fixture(scope="module")
def forger(tmp_path_factory):
    return Forger(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Another root, with the same names."""
    return Forger(tmp_path_factory.mktemp("stranger"))


def failures(forger, evidence, now=NOW, **policy):
    return [finding.check for finding in judge(evidence, policy=forger.policy(**policy), now=now).failures]


BOTH = pytest.mark.parametrize("format", [SGX, TDX])


@BOTH
def test_what_is_forged_here_holds_when_nothing_is_wrong(forger, format):
    assert failures(forger, forger.evidence(format)) == []


@BOTH
def test_a_root_of_the_same_name_is_another_root(forger, stranger, format):
    assert failures(forger, stranger.evidence(format)) == ["genuine"]


@BOTH
def test_collateral_of_another_root(forger, stranger, format):
    evidence = replace(forger.evidence(format), collateral=stranger.collateral(format))
    assert failures(forger, evidence) == ["genuine"]


@BOTH
def test_a_processor_of_another_root(forger, stranger, format):
    """The chain is the honest one, and somebody else's key signed for the quoting enclave."""
    quote = forger.quote(format, processor_key=stranger.authority.processor_key)
    assert failures(forger, Evidence.of(quote, collateral=forger.collateral(format))) == ["genuine"]
    quote = forger.quote(format, chain=stranger.authority.chain(span()))
    assert failures(forger, Evidence.of(quote, collateral=forger.collateral(format))) == ["genuine"]


@BOTH
def test_a_quoting_key_that_the_processor_did_not_sign(forger, format):
    honest, other = forger.quote(format), ec.generate_private_key(ec.SECP256R1())
    facts = Evidence.of(honest).facts
    forged = forger.quote(format, quoting_key=other)
    start = facts.body.stop + 4
    mixed = honest[:start] + forged[start : start + 128] + honest[start + 128 :]  # signature and key of another
    assert failures(forger, Evidence.of(mixed, collateral=forger.collateral(format))) == ["genuine"]


@BOTH
@pytest.mark.parametrize(
    "wrong",
    [
        {"info": {"fmspc": "00906ED50001"}},
        {"info": {"tcbLevels": []}},
        {"identity": {"mrsigner": "00" * 32}},
        {"identity": {"isvprodid": 7}},
        {"identity": {"tcbLevels": []}},
        {"identity": {"attributes": "13" + "00" * 15}},
        {"identity": {"miscselect": "00000001"}},
        {"status": "Revoked"},
        {"status": "Unknown"},
        {"revoked": [PCK]},
        {"revoked": [PROCESSOR]},
        {"revoked": [SIGNING]},
        {"dates": span(-3, -2)},
        {"dates": span(2, 3)},
    ],
    ids=str,
)
def test_collateral_that_does_not_vouch_for_it(forger, format, wrong):
    evidence = replace(forger.evidence(format), collateral=forger.collateral(format, **wrong))
    assert failures(forger, evidence) == ["genuine"]


@BOTH
def test_collateral_for_another_pce_of_the_same_family(forger, format):
    evidence = replace(forger.evidence(format), collateral=forger.collateral(format, info={"pceId": "0001"}))
    assert failures(forger, evidence) == ["collateral"]


@BOTH
def test_collateral_for_the_other_format(forger, format):
    other = forger.collateral(TDX if format == SGX else SGX)
    assert failures(forger, replace(forger.evidence(format), collateral=other)) == ["genuine"]


@BOTH
@pytest.mark.parametrize("part", ["tcb_info", "qe_identity"])
def test_a_statement_that_was_changed_after_it_was_signed(forger, format, part):
    words = json.loads(forger.collateral(format, status="OutOfDate"))
    words[part] = words[part].replace("OutOfDate", "UpToDate").replace('"isvsvn":1', '"isvsvn":0')
    evidence = replace(forger.evidence(format), collateral=json.dumps(words).encode())
    assert failures(forger, evidence) == ["genuine"]


@BOTH
def test_revocation_lists_of_another(forger, stranger, format):
    for part in ("root_ca_crl", "pck_crl"):
        words = json.loads(forger.collateral(format))
        words[part] = json.loads(stranger.collateral(format))[part]
        evidence = replace(forger.evidence(format), collateral=json.dumps(words).encode())
        assert failures(forger, evidence) == ["genuine"], part


@BOTH
def test_a_revocation_list_of_the_wrong_authority(forger, format):
    """Both are genuine, but nobody says whether the processor is revoked."""
    words = json.loads(forger.collateral(format, revoked=[PCK]))
    words["pck_crl"] = words["root_ca_crl"]
    evidence = replace(forger.evidence(format), collateral=json.dumps(words).encode())
    assert failures(forger, evidence) == ["genuine"]


@BOTH
def test_a_quote_that_expired_with_its_chain(forger, format):
    quote = forger.quote(format, chain=forger.authority.chain(span(-3, -2)))
    assert failures(forger, Evidence.of(quote, collateral=forger.collateral(format))) == ["genuine"]


@BOTH
def test_the_client_decides_what_time_it_is(forger, format):
    evidence = forger.evidence(format)
    assert failures(forger, evidence, now=NOW + 2 * 86400) == ["genuine"]
    assert failures(forger, evidence, now=NOW - 2 * 86400) == ["genuine"]


@BOTH
def test_a_status_is_accepted_by_its_name_alone(forger, format):
    for status in ("OutOfDate", "SWHardeningNeeded", "OutOfDateConfigurationNeeded"):
        evidence = replace(forger.evidence(format), collateral=forger.collateral(format, status=status))
        assert failures(forger, evidence) == ["tcb"]
        assert failures(forger, evidence, allow_status=frozenset({"ConfigurationNeeded"})) == ["tcb"]
        assert failures(forger, evidence, allow_status=frozenset({status})) == []


@BOTH
def test_an_old_quoting_enclave_is_refused_too(forger, format):
    levels = [{"tcb": {"isvsvn": 1}, "tcbDate": "2020-01-01T00:00:00Z", "tcbStatus": "OutOfDate"}]
    collateral = forger.collateral(format, identity={"tcbLevels": levels})
    evidence = replace(forger.evidence(format), collateral=collateral)
    assert failures(forger, evidence) == ["tcb"]
    assert failures(forger, evidence, allow_status=frozenset({"OutOfDate"})) == []


@BOTH
def test_debug_mode(forger, format):
    evidence = forger.evidence(format, body=body_of(format, debug=True))
    assert evidence.facts.debug
    assert "debug" in failures(forger, evidence)


def test_each_bit_of_a_td_that_weakens_it_is_refused(forger):
    """Bits 0 to 7 are debug modes; 28 is a protection that must be there, 29 lets it be moved to another machine."""
    honest = body_of(TDX)
    for bit in (*range(8), 28, 29):
        body = bytearray(honest)
        body[120 + bit // 8] ^= 1 << bit % 8
        evidence = forger.evidence(TDX, body=bytes(body))
        assert evidence.facts.debug == (bit < 8)
        assert "genuine" in failures(forger, evidence), bit


def test_a_module_that_intel_did_not_sign(forger):
    body = bytearray(body_of(TDX))
    body[64:112] = b"\x01" * 48  # MRSIGNERSEAM
    assert failures(forger, forger.evidence(TDX, body=bytes(body))) == ["genuine"]


@BOTH
def test_a_quoting_enclave_of_another_vendor(forger, format):
    assert failures(forger, forger.evidence(format, vendor=bytes(16))) == ["genuine"]


def test_a_td_that_claims_to_be_an_enclave(forger):
    """The signature is over the header too, but the reader must not even get there with the wrong lengths."""
    for version in (3, 4, 5):
        raw = bytearray(forger.quote(TDX))
        struct.pack_into("<HHI", raw, 0, version, 2, 0)
        with pytest.raises(TrustError) as refusal:
            Evidence.of(bytes(raw))
        assert refusal.value.check == "format"


def test_an_enclave_that_claims_to_be_a_td(forger):
    raw = bytearray(forger.quote(SGX))
    struct.pack_into("<HHI", raw, 0, 4, 2, 0x81)
    with pytest.raises(TrustError) as refusal:
        Evidence.of(bytes(raw))
    assert refusal.value.check == "format"


class TestVersionFive:
    def judged(self, forger, kind, size, body, format=TDX):
        raw = version_5(forger, kind, size, body, format=format)
        return failures(forger, Evidence.of(raw, collateral=forger.collateral(format)))

    def test_both_bodies_of_a_td(self, forger):
        assert self.judged(forger, 2, 584, body_of(TDX)) == []
        assert self.judged(forger, 3, 648, body_of(TDX) + bytes(64)) == []

    def test_its_facts_are_read_behind_the_description(self, forger):
        facts = Evidence.of(version_5(forger, 3, 648, body_of(TDX) + bytes(64))).facts
        assert (facts.version, facts.measurement, facts.registers) == (5, TD_MEASUREMENT, REGISTERS)
        assert (facts.report_data, facts.body) == (DATA, range(54, 702))

    def test_a_td_that_another_td_serves(self, forger):
        assert self.judged(forger, 3, 648, body_of(TDX) + bytes(16) + b"\x01" * 48) == ["genuine"]

    @pytest.mark.parametrize(
        ("kind", "size", "format"),
        [
            (0, 584, TDX),
            (4, 584, TDX),
            (1, 584, TDX),
            (1, 384, TDX),
            (2, 648, TDX),
            (2, 584, SGX),
            (3, 0, TDX),
            (0, 0, TDX),
        ],
    )
    def test_a_body_that_is_not_what_it_is_called(self, forger, kind, size, format):
        with pytest.raises(TrustError) as refusal:
            Evidence.of(version_5(forger, kind, size, body_of(TDX), format=format))
        assert refusal.value.check == "format"


@BOTH
def test_what_follows_behind_a_quote(forger, format):
    evidence = forger.evidence(format)
    padded = replace(evidence, quote=evidence.quote + bytes(70))
    assert failures(forger, padded) == []
    assert padded.facts == evidence.facts
    for more in (b"x", bytes(70) + b"x", evidence.quote):
        with pytest.raises(TrustError, match="something follows"):
            replace(evidence, quote=evidence.quote + more)


@BOTH
def test_lengths_inside_a_quote_that_lie(forger, format):
    """Each four bytes of the signature's part in turn claim four gigabytes, or nothing."""
    evidence = forger.evidence(format)
    start = evidence.facts.body.stop
    for at in [start, *range(start + 4 + 128, start + 4 + 128 + 12), *range(start + 4 + 128 + 448, start + 700, 2)]:
        for value in (0, 0xFFFFFFFF):
            raw = bytearray(evidence.quote)
            struct.pack_into("<I", raw, at, value)
            if bytes(raw) == evidence.quote:
                continue
            try:
                assert failures(forger, replace(evidence, quote=bytes(raw))), at
            except TrustError:
                continue


NESTED = b'{"a":' * 50_000


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"1" * 1000, NESTED, b"[" * 100_000, b'{"tcb_info": 1}'],
    ids=range(9),
)
def test_collateral_that_is_none_cannot_be_read(forger, content):
    with pytest.raises(TrustError) as refusal:
        judge(replace(forger.evidence(), collateral=content), policy=None, now=NOW)
    assert refusal.value.check == "format"


def test_nesting_in_what_is_signed_is_refused(forger):
    words = json.loads(forger.collateral())
    words["tcb_info"] = NESTED.decode()
    assert failures(forger, replace(forger.evidence(), collateral=json.dumps(words).encode())) == ["genuine"]


@BOTH
def test_chains_that_are_none(forger, format):
    certificate = forger.authority.chain(span())
    block = certificate[: certificate.index(b"-----END")]
    for chain in (b"", b"x", block, certificate[:1000], certificate[::-1], certificate * 12):
        quote = forger.quote(format, chain=chain or b"\0")
        found = failures(forger, Evidence.of(quote, collateral=forger.collateral(format)))
        assert found in (["genuine"], []), chain[:20]
        assert found or chain == certificate * 12  # more of the same behind the root changes nothing


def test_sizes_that_nobody_needs_are_not_read(forger):
    evidence = forger.evidence()
    for wrong in (
        {"quote": evidence.quote + bytes(MAX_QUOTE_BYTES)},
        {"collateral": bytes(MAX_COLLATERAL_BYTES + 1)},
        {"certificates": (b"x",) * 17},
        {"certificates": (bytes(1 << 20),)},
    ):
        with pytest.raises(TrustError, match="at most"):
            replace(evidence, **wrong)


@BOTH
def test_no_collateral_no_verdict(forger, format):
    assert failures(forger, replace(forger.evidence(format), collateral=None)) == ["collateral"]
