"""Where evidence comes from, over simulated files of a kernel and of Gramine."""

import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from darknight.errors import TrustError, UsageError
from darknight.trust.platforms import ConfigfsTsm, Gramine, certificate_table, find_provider
from darknight.trust.quote import TDX
from darknight.trust.verify import judge
from trust.forge import DATA, NOW, Forger, body_of
from trust.foundry import NOW as SNP_NOW
from trust.foundry import Foundry
from trust.kernel_files import ATTRIBUTES, Kernel, SimulatedGramine, SimulatedTsm
from trust.test_snp import policy_of

HONEST = Foundry()


@pytest.fixture
def forger(tmp_path):
    return Forger(tmp_path / "root")


@pytest.fixture
def tsm(tmp_path, monkeypatch):
    (tmp_path / "report").mkdir()

    def root(kernel):
        monkeypatch.setattr(SimulatedTsm, "kernel", kernel)
        return SimulatedTsm(tmp_path / "report")

    return root


@pytest.fixture
def gramine(tmp_path, monkeypatch):
    (tmp_path / "attestation").mkdir()
    for name in ("user_report_data", "quote"):
        (tmp_path / "attestation" / name).touch()

    def root(quote):
        monkeypatch.setattr(SimulatedGramine, "quote", staticmethod(quote))
        return SimulatedGramine(tmp_path / "attestation")

    return root


def snp_report(data):
    return HONEST.report(report_data=data)


def table(*contents):
    """As the host writes it: GUID, offset and length of each, zeros, and what they point to."""
    start = 24 * (len(contents) + 1)
    entries, body = b"", b""
    for number, content in enumerate(contents, 1):
        entries += bytes([number]) * 16 + struct.pack("<II", start + len(body), len(content))
        body += content
    return entries + bytes(24) + body


def left_behind(tmp_path):
    return list((tmp_path / "report").iterdir())


def test_an_snp_guest(tsm, tmp_path):
    kernel = Kernel(snp_report, auxblob=table(*HONEST.chain) + bytes(100))
    provider = ConfigfsTsm(tsm(kernel))
    evidence = provider.evidence(DATA)
    assert (evidence.format, evidence.facts.report_data, len(evidence.certificates)) == ("snp", DATA, 3)
    assert judge(evidence, policy=policy_of(), now=SNP_NOW, report_data=DATA).holds
    assert not provider.simulated
    assert not left_behind(tmp_path)
    assert len(kernel.removed) == 1


def test_each_question_has_a_folder_of_its_own(tsm):
    kernel = Kernel(snp_report)
    provider = ConfigfsTsm(tsm(kernel))
    for data in (DATA, DATA[::-1]):
        assert provider.evidence(data).facts.report_data == data
    assert len(set(kernel.removed)) == 2


def test_certificates_from_files_where_the_host_hands_out_none(tsm, tmp_path):
    paths = []
    for number, content in enumerate(HONEST.chain):
        paths.append(tmp_path / f"{number}.der")
        paths[-1].write_bytes(content)
    attributes = tuple(name for name in ATTRIBUTES if name != "auxblob")
    for kernel in (Kernel(snp_report), Kernel(snp_report, attributes=attributes)):
        evidence = ConfigfsTsm(tsm(kernel), certificates=tuple(paths)).evidence(DATA)
        assert judge(evidence, policy=policy_of(), now=SNP_NOW).holds


def test_a_td(tsm, tmp_path, forger):
    (tmp_path / "collateral.json").write_bytes(forger.collateral(TDX))
    kernel = Kernel(
        lambda data: forger.quote(TDX, body=body_of(TDX, report_data=data)) + bytes(70), provider=b"tdx_guest\n"
    )
    evidence = ConfigfsTsm(tsm(kernel), collateral=tmp_path / "collateral.json").evidence(DATA)
    assert judge(evidence, policy=forger.policy(), now=NOW, report_data=DATA).holds
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(
    ("kernel", "complaint", "check"),
    [
        (Kernel(snp_report, generation=b"2\n"), "generation", "provider"),
        (Kernel(snp_report, generation=b""), "generation", "provider"),
        (Kernel(snp_report, generation=b"11\n"), "generation", "provider"),
        (Kernel(snp_report, provider=b"arm_cca\n"), "'arm_cca' is unknown; known are sev_guest", "provider"),
        (Kernel(snp_report, provider=b"\xff\n"), "is unknown", "provider"),
        (Kernel(snp_report, provider=b"tdx_guest\n"), "tdx_guest gave a quote of the format snp", "provider"),
        (Kernel(lambda data: b""), "too few", "format"),
        (Kernel(lambda data: snp_report(data)[:-1]), "exactly 1184", "format"),
        (Kernel(lambda data: bytes(1 << 20)), "more than 65,536 bytes", "provider"),
        (Kernel(lambda data: snp_report(bytes(64))), "other report data", "provider"),
        (Kernel(snp_report, auxblob=b"x" * 100), "table of certificates", "provider"),
        *((Kernel(snp_report, attributes=ATTRIBUTES[:count]), "No such file", "provider") for count in range(4)),
    ],
    ids=range(15),
)
def test_a_kernel_that_does_something_else(tsm, tmp_path, kernel, complaint, check):
    with pytest.raises(TrustError) as refusal:
        ConfigfsTsm(tsm(kernel)).evidence(DATA)
    assert complaint in str(refusal.value)
    assert refusal.value.check == check
    assert not left_behind(tmp_path)


def test_no_configfs_at_all(tmp_path):
    with pytest.raises(TrustError, match="inside a TEE"):
        ConfigfsTsm(tmp_path / "gone").evidence(DATA)


def test_an_enclave_under_gramine(gramine, forger, tmp_path):
    (tmp_path / "collateral.json").write_bytes(forger.collateral())
    root = gramine(lambda data: forger.quote(body=body_of("sgx", report_data=data)))
    evidence = Gramine(root, collateral=tmp_path / "collateral.json").evidence(DATA)
    assert judge(evidence, policy=forger.policy(), now=NOW, report_data=DATA).holds
    assert Gramine(root).evidence(DATA).collateral is None


@pytest.mark.parametrize(
    ("quote", "complaint"),
    [
        (lambda data: b"", "too few"),
        (lambda data: bytes(1 << 20), "more than"),
        (lambda data: HONEST.report(report_data=data[::-1]), "other report data"),
    ],
    ids=range(3),
)
def test_a_gramine_that_does_something_else(gramine, quote, complaint):
    with pytest.raises(TrustError, match=complaint):
        Gramine(gramine(quote)).evidence(DATA)


def test_threads_do_not_get_each_others_quotes(gramine, forger):
    provider = Gramine(gramine(lambda data: forger.quote(body=body_of("sgx", report_data=data))))
    asked = [bytes([number]) * 64 for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        assert [each.facts.report_data for each in threads.map(provider.evidence, asked)] == asked


def test_no_gramine_at_all(tmp_path):
    with pytest.raises(TrustError, match="user_report_data: No such file"):
        Gramine(tmp_path).evidence(DATA)
    assert not list(tmp_path.iterdir())  # what is not there is not made


def test_collateral_that_is_not_there(gramine, forger, tmp_path):
    root = gramine(lambda data: forger.quote(body=body_of("sgx", report_data=data)))
    with pytest.raises(TrustError, match=r"collateral\.json: No such file"):
        Gramine(root, collateral=tmp_path / "collateral.json").evidence(DATA)


@pytest.mark.parametrize("provider", [Gramine, ConfigfsTsm])
def test_report_data_has_64_bytes(tmp_path, provider):
    with pytest.raises(UsageError, match="needs 64"):
        provider(tmp_path).evidence(bytes(63))


def test_what_the_machine_has(tmp_path):
    here, there = tmp_path / "attestation", tmp_path / "report"
    with pytest.raises(UsageError, match="no TEE here"):
        find_provider(gramine=here, configfs_tsm=there)
    there.mkdir()
    assert find_provider(gramine=here, configfs_tsm=there).name == "configfs-tsm"
    here.mkdir()
    (here / "quote").touch()
    assert find_provider(gramine=here, configfs_tsm=there).name == "gramine"
    assert isinstance(here, Path)


class TestTable:
    def test_what_is_in_it(self):
        assert certificate_table(table(b"one", b"three")) == (b"one", b"three")
        assert certificate_table(bytes(24)) == ()
        assert certificate_table(b"") == ()

    @pytest.mark.parametrize(
        "wrong",
        [
            b"x",
            bytes(23),
            table(b"one")[:24],  # no end
            table(b"one")[:-1],  # points behind its end
            table(b""),
            table(*[b"x"] * 17),
            b"\1" * 16 + struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF) + bytes(24),
        ],
        ids=range(7),
    )
    def test_what_is_none(self, wrong):
        with pytest.raises(TrustError, match="malformed"):
            certificate_table(wrong)
