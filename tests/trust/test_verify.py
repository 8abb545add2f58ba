"""What a policy asks for is compared, each part of it, and keys go nowhere without a measurement."""

import json
import time
from dataclasses import replace

import pytest

from darknight.errors import TrustError, UsageError
from darknight.trust import intel
from darknight.trust.evidence import Evidence
from darknight.trust.policy import Policy
from darknight.trust.quote import SGX, TDX
from darknight.trust.verify import Verdict, attested, judge
from trust.forge import DATA, NOW, REGISTERS, SGX_MEASUREMENT, SIGNER, TD_MEASUREMENT, Forger, body_of

ZEROS = bytes(16)  # the PPID of a simulated processor


@pytest.fixture(scope="module")
def forger(tmp_path_factory):
    return Forger(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def enclave(forger):
    return forger.evidence(SGX, body=body_of(SGX, product=7, svn=3))


@pytest.fixture(scope="module")
def td(forger):
    return forger.evidence(TDX)


def wanted(forger, format, **more):
    if format == SGX:
        return forger.policy(**{"measurements": frozenset({SGX_MEASUREMENT}), **more})
    registers = {number: frozenset({value}) for number, value in enumerate(REGISTERS)}
    return forger.policy(**{"measurements": frozenset({TD_MEASUREMENT}), "rtmr": registers, **more})


def refusal_of(evidence, policy, report_data=DATA, now=NOW):
    with pytest.raises(TrustError) as refusal:
        attested(evidence, policy=policy, now=now, report_data=report_data)
    return refusal.value.check


def test_everything_that_a_policy_can_ask_of_an_enclave(forger, enclave):
    policy = wanted(
        forger,
        SGX,
        measurements=frozenset({bytes(32), SGX_MEASUREMENT}),
        signers=frozenset({SIGNER, bytes(32)}),
        product=7,
        minimum_svn=3,
        chip_ids=frozenset({ZEROS}),
    )
    found = attested(enclave, policy=policy, now=NOW, report_data=DATA)
    assert found.measurement == SGX_MEASUREMENT
    checked = {finding.check for finding in found.verdict.findings}
    assert checked >= {"measurement", "signer", "product", "svn", "chip", "report_data", "debug", "tcb", "root"}
    assert not any("no measurement was compared" in note for note in found.verdict.notes)


@pytest.mark.parametrize(
    ("more", "check"),
    [
        ({"measurements": frozenset({SGX_MEASUREMENT[::-1][:31] + b"\0"})}, "measurement"),
        ({"measurements": frozenset({SGX_MEASUREMENT + bytes(16)})}, "measurement"),
        ({"signers": frozenset({bytes(32)})}, "signer"),
        ({"signers": frozenset({SIGNER + bytes(16)})}, "signer"),
        ({"product": 0}, "product"),
        ({"minimum_svn": 4}, "svn"),
        ({"chip_ids": frozenset({b"\x01" * 16})}, "chip"),
        ({"rtmr": {0: frozenset({bytes(48)})}}, "registers"),
    ],
)
def test_an_enclave_that_is_another_is_refused(forger, enclave, more, check):
    assert refusal_of(enclave, wanted(forger, SGX, **more)) == check


@pytest.mark.parametrize(
    ("more", "check"),
    [
        ({"measurements": frozenset({TD_MEASUREMENT[:32]})}, "measurement"),
        ({"rtmr": {1: frozenset({REGISTERS[1]}), 2: frozenset({REGISTERS[3]})}}, "registers"),
        ({"signers": frozenset({bytes(48)})}, "signer"),  # a TD names none, which is not the same as zeros
        ({"product": 0}, "product"),
        ({"minimum_svn": 1}, "svn"),
    ],
)
def test_a_td_that_is_another_is_refused(forger, td, more, check):
    assert attested(td, policy=wanted(forger, TDX), now=NOW, report_data=DATA).simulated
    assert refusal_of(td, wanted(forger, TDX, **more)) == check


@pytest.mark.parametrize("format", [SGX, TDX])
def test_report_data_is_compared_to_the_last_bit(forger, enclave, td, format):
    evidence, policy = {SGX: enclave, TDX: td}[format], wanted(forger, format)
    assert attested(evidence, policy=policy, now=NOW, report_data=DATA)
    for bit in range(512):
        other = bytearray(DATA)
        other[bit // 8] ^= 1 << bit % 8
        assert refusal_of(evidence, policy, bytes(other)) == "report_data"
    assert judge(evidence, policy=policy, now=NOW).holds  # whoever does not compare does not notice


def test_no_keys_without_a_measurement(forger, enclave):
    for policy in (forger.policy(), forger.policy(signers=frozenset({SIGNER})), Policy()):
        with pytest.raises(UsageError, match="names no measurement"):
            attested(enclave, policy=policy, now=NOW, report_data=DATA)


@pytest.mark.parametrize("registers", [(), (0,), (1,), (0, 2, 3)])
def test_no_keys_to_a_td_of_which_only_the_firmware_is_known(forger, td, registers):
    policy = wanted(forger, TDX, rtmr={number: frozenset({REGISTERS[number]}) for number in registers})
    with pytest.raises(UsageError, match="MRTD measures a TD's firmware alone"):
        attested(td, policy=policy, now=NOW, report_data=DATA)


def test_the_simulated_root_takes_the_insecure_setting(forger, enclave):
    policy = replace(wanted(forger, SGX), insecure_simulated_root=None)
    assert refusal_of(enclave, policy) == "genuine"
    words = judge(enclave, policy=policy, now=NOW).failures[0].words
    assert "SIMULATED" in words
    assert "insecure_" in words


def test_a_verdict_says_that_no_measurement_was_compared(forger, enclave):
    verdict = judge(enclave, policy=forger.policy(), now=NOW)
    assert verdict.holds
    assert any("no measurement was compared" in note for note in verdict.notes)


def test_what_was_not_used_is_said(forger, enclave):
    spare = replace(enclave, certificates=(b"x",))
    assert any("certificates were not used" in note for note in judge(spare, policy=None, now=NOW).notes)
    hashed = forger.policy(configurations=frozenset({bytes(32)}))
    assert any("configuration" in note for note in judge(enclave, policy=hashed, now=NOW).notes)


def test_a_verdict_in_words_is_json(forger, enclave):
    words = json.loads(json.dumps(judge(enclave, policy=forger.policy(), now=NOW, report_data=DATA).to_words()))
    assert (words["holds"], words["simulated"], words["format"], words["debug"]) == (True, True, "sgx", False)
    assert (words["measurement"], words["report_data"]) == (SGX_MEASUREMENT.hex(), DATA.hex())
    assert words["tcb"]["status"] == "UpToDate"
    assert {finding["check"] for finding in words["findings"]} >= {"genuine", "tcb", "debug", "report_data"}


def test_nothing_found_is_not_everything_in_order(enclave):
    """A broken verifier that checks nothing must not look like one that found nothing wrong."""
    verdict = Verdict(
        facts=enclave.facts,
        findings=(),
        notes=(),
        status=None,
        advisories=(),
        tcb=None,
        chip=None,
        simulated=False,
    )
    assert not verdict.holds


@pytest.mark.parametrize("now", [-1, 1 << 40, 1 << 64, -(1 << 70)])
def test_times_that_are_none(enclave, now):
    with pytest.raises(UsageError, match="Unix seconds"):
        judge(enclave, policy=None, now=now)


@pytest.mark.parametrize("size", [0, 32, 63, 65])
def test_report_data_of_another_length(forger, enclave, size):
    with pytest.raises(UsageError, match="needs 64"):
        attested(enclave, policy=wanted(forger, SGX), now=NOW, report_data=bytes(size))


def test_roots_that_are_none(enclave):
    for root in (b"", b"x", b"-----BEGIN CERTIFICATE-----"):
        with pytest.raises(TrustError) as refusal:
            judge(enclave, policy=Policy(insecure_simulated_root=root), now=NOW)
        assert refusal.value.check == "format"


def test_a_library_that_does_not_verify_would_be_noticed(forger, enclave, monkeypatch):
    """Even one that says yes to everything, with the claims of another quote: what we read is then something else."""
    honest = judge(enclave, policy=forger.policy(), now=NOW)
    claims = []
    genuine = intel._verified
    monkeypatch.setattr(intel, "_verified", lambda *given: claims.append(genuine(*given)) or claims[0])
    assert judge(enclave, policy=forger.policy(), now=NOW).findings == honest.findings
    monkeypatch.setattr(intel, "_verified", lambda *_: claims[0])

    def failures(at):
        quote = bytearray(enclave.quote)
        quote[at] ^= 1
        changed = replace(enclave, quote=bytes(quote))
        return [finding.check for finding in judge(changed, policy=forger.policy(), now=NOW).failures]

    assert failures(30) == []  # the header's user data, which only the signature covers
    body = enclave.facts.body.start
    assert {*map(tuple, map(failures, (body + 64, body + 128, body + 256, body + 320)))} == {("agreement",)}


def test_a_verdict_is_quick(forger, enclave, figure):
    policy, start = wanted(forger, SGX), time.perf_counter()
    for _ in range(20):
        attested(enclave, policy=policy, now=NOW, report_data=DATA)
    seconds = (time.perf_counter() - start) / 20
    figure("attested(), one SGX quote", f"{1000 * seconds:.1f} ms")
    assert seconds < 1


def test_evidence_survives_the_wire(forger, enclave):
    again = Evidence.from_words(json.loads(json.dumps(enclave.to_words())))
    assert attested(again, policy=wanted(forger, SGX), now=NOW, report_data=DATA)
