"""Real evidence is judged as its README says, and not at all any more when a single bit of it is changed."""

import json
import warnings
from dataclasses import replace

import pytest
from cryptography import x509

from darknight.errors import TrustError
from darknight.trust.certificates import key_hash
from darknight.trust.intel import INTEL_ROOT
from darknight.trust.policy import Policy
from darknight.trust.snp_chain import AMD_ROOTS
from darknight.trust.verify import attested, judge
from trust.samples import OUTDATED_NOW, SGX_NOW, SGX_STATUS, SNP_NOW, TDX_NOW, evidence_of, folder_in

ALLOW = Policy(allow_status=frozenset({SGX_STATUS}))
TODAY = 1_780_000_000  # after the collateral of these samples has expired


@pytest.fixture
def folder(shared):
    return folder_in(shared)


def verdict_on(folder, name, now, policy=None):
    return judge(evidence_of(folder, name), policy=policy, now=now)


def checks(verdict):
    return [finding.check for finding in verdict.failures]


def test_the_enclave_needs_its_status_allowed(folder):
    refused = verdict_on(folder, "sgx", SGX_NOW)
    assert (checks(refused), refused.status) == (["tcb"], SGX_STATUS)
    accepted = verdict_on(folder, "sgx", SGX_NOW, ALLOW)
    assert accepted.holds
    assert accepted.facts.report_data.startswith(b"Hello, world!")
    assert (accepted.facts.version, accepted.facts.debug, accepted.simulated) == (3, False, False)
    assert accepted.advisories


def test_the_td_is_up_to_date_and_shows_what_is_accepted(folder):
    verdict = verdict_on(folder, "tdx", TDX_NOW)
    assert (verdict.holds, verdict.status, verdict.facts.version) == (True, "UpToDate", 4)
    assert any("dynamic platform, cached keys, SMT" in note for note in verdict.notes)
    assert any("no measurement was compared" in note for note in verdict.notes)


def test_the_td_is_refused_when_its_collateral_has_expired(folder):
    verdict = verdict_on(folder, "tdx", TODAY)
    assert checks(verdict) == ["genuine"]
    assert "expired" in verdict.failures[0].words


def test_the_outdated_td_is_refused(folder):
    verdict = verdict_on(folder, "tdx outdated", OUTDATED_NOW)
    assert (checks(verdict), verdict.facts.version) == (["genuine"], 5)
    assert "No matching TCB level" in verdict.failures[0].words


def test_the_guest_holds_and_the_one_with_debug_does_not(folder):
    verdict = verdict_on(folder, "snp", SNP_NOW)
    assert verdict.holds
    assert any("revocation not checked" in note for note in verdict.notes)
    assert checks(verdict_on(folder, "snp debug", SNP_NOW)) == ["debug"]


def test_oddities_of_real_certificates_raise_no_warning(folder):
    """Every VCEK has the serial number 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict_on(folder, "snp", SNP_NOW).holds


def test_a_tampered_certificate_is_refused(folder):
    assert checks(verdict_on(folder, "snp tampered", SNP_NOW)) == ["chain"]


def test_the_guest_is_refused_before_and_after_its_certificate_is_valid(folder):
    assert checks(verdict_on(folder, "snp", 1674000000)) == ["dates"]
    assert checks(verdict_on(folder, "snp", 1900000000)) == ["dates"]


def test_another_products_chain_is_refused(folder):
    evidence = evidence_of(folder, "snp")
    for other in ("amd_ask_ark_genoa.pem", "amd_ask_ark_turin_vcek.pem"):
        wrong = replace(evidence, certificates=(evidence.certificates[0], (folder / other).read_bytes()))
        assert checks(judge(wrong, policy=None, now=SNP_NOW)) == ["chain"]


def test_the_pinned_roots_are_amds(folder):
    found = {}
    for product in ("milan", "genoa", "turin_vcek"):
        chain = x509.load_pem_x509_certificates((folder / f"amd_ask_ark_{product}.pem").read_bytes())
        found |= {key_hash(chain[-1]): product.partition("_")[0].capitalize()}
    assert found == AMD_ROOTS


def test_a_verdict_under_intels_own_root_names_it(folder, monkeypatch):
    """The library brings Intel's root along; if it ever brought another one, that would be noticed here."""
    monkeypatch.setattr("darknight.trust.intel.INTEL_ROOT", INTEL_ROOT[::-1])
    assert checks(verdict_on(folder, "tdx", TDX_NOW)) == ["root"]


def test_keys_are_released_to_the_td_that_a_policy_names_alone(folder):
    evidence = evidence_of(folder, "tdx")
    facts = evidence.facts
    registers = {number: frozenset({value}) for number, value in enumerate(facts.registers)}
    policy = Policy(measurements=frozenset({facts.measurement}), rtmr=registers)
    assert not attested(evidence, policy=policy, now=TDX_NOW, report_data=facts.report_data).simulated
    with pytest.raises(TrustError) as refusal:
        attested(evidence, policy=policy, now=TDX_NOW, report_data=bytes(64))
    assert refusal.value.check == "report_data"
    other = replace(policy, measurements=frozenset({bytes(48)}))
    with pytest.raises(TrustError) as refusal:
        attested(evidence, policy=other, now=TDX_NOW, report_data=facts.report_data)
    assert refusal.value.check == "measurement"


def survives(evidence, now, policy, **changes):
    """Whether it still holds with these changes; what cannot be read does not."""
    try:
        return judge(replace(evidence, **changes), policy=policy, now=now).holds
    except TrustError as error:
        if error.check != "format":
            raise
        return False


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


SAMPLES = pytest.mark.parametrize(
    ("name", "now", "policy"),
    [("sgx", SGX_NOW, ALLOW), ("tdx", TDX_NOW, None), ("snp", SNP_NOW, None)],
    ids=["sgx", "tdx", "snp"],
)


@SAMPLES
def test_every_bit_of_header_and_body_counts(folder, full, tally, name, now, policy):
    """With --full; otherwise one in three, which is some of each byte, and every place in a byte."""
    evidence = evidence_of(folder, name)
    assert survives(evidence, now, policy)
    bits = range(0, 8 * evidence.facts.body.stop, 1 if full else 3)
    survivors = [bit for bit in bits if survives(evidence, now, policy, quote=flipped(evidence.quote, bit))]
    assert survivors == []
    tally(f"bit flips, {name}", {"refused": len(bits) - len(survivors), "accepted": len(survivors)})


@SAMPLES
def test_bits_of_signatures_and_certificates_count(folder, full, name, now, policy):
    """Behind the body: lengths, signatures, keys, certificates. What a PEM text ignores is not of the evidence."""
    evidence = evidence_of(folder, name)
    start, end = evidence.facts.body.stop, evidence.quote.find(b"-----BEGIN")
    end = evidence.facts.size if end < 0 else end
    bits = range(8 * start, 8 * end, 1 if full else 5)
    assert [bit for bit in bits if survives(evidence, now, policy, quote=flipped(evidence.quote, bit))] == []


def test_bits_of_a_certificate_count(folder, full):
    evidence = evidence_of(folder, "snp")
    leaf, chain = evidence.certificates
    for bit in range(0, 8 * len(leaf), 1 if full else 13):
        assert not survives(evidence, SNP_NOW, None, certificates=(flipped(leaf, bit), chain)), bit


@pytest.mark.parametrize(("name", "now", "policy"), [("sgx", SGX_NOW, ALLOW), ("tdx", TDX_NOW, None)])
def test_bits_of_the_collateral_count(folder, full, name, now, policy):
    """Of what is signed in it; each part is given as text or as hexadecimal digits."""
    evidence = evidence_of(folder, name)
    words = json.loads(evidence.collateral)
    for part in ("tcb_info", "qe_identity", "tcb_info_signature", "qe_identity_signature", "root_ca_crl", "pck_crl"):
        for place in range(0, len(words[part]), 1 if full else 41):
            other = "1" if words[part][place] == "0" else "0"
            changed = {**words, part: words[part][:place] + other + words[part][place + 1 :]}
            assert not survives(evidence, now, policy, collateral=json.dumps(changed).encode()), (part, place)
