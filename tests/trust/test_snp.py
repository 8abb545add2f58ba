"""SEV-SNP reports of a vendor that exists in this file alone, right and wrong in every way that we know."""

from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from darknight.errors import TrustError, UsageError
from darknight.trust.certificates import key_hash
from darknight.trust.evidence import Evidence
from darknight.trust.findings import holds
from darknight.trust.policy import Policy
from darknight.trust.snp_chain import AMD_ROOTS
from darknight.trust.verify import attested, judge
from trust.foundry import AMD, CHIP, NOW, TCB, Foundry, at, der, leaf_key, rsa_key, usage

HONEST = Foundry()
DATA = bytes(range(64))


def policy_of(foundry=HONEST, **more):
    return Policy(insecure_simulated_root=foundry.root.public_bytes(Encoding.DER), **more)


def verdict_on(foundry=HONEST, *, certificates=None, accept=None, now=NOW, root=None, **report):
    evidence = Evidence.of(foundry.report(**report), certificates=certificates or foundry.chain)
    return judge(evidence, policy=accept or policy_of(root or foundry), now=now)


def failures(*arguments, **named):
    return [finding.check for finding in verdict_on(*arguments, **named).failures]


@pytest.mark.parametrize("product", ["Milan", "Genoa", "Turin"])
@pytest.mark.parametrize("vlek", [False, True])
@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_an_honest_report_holds(product, vlek, version):
    foundry = Foundry(product=product, vlek=vlek)
    verdict = verdict_on(foundry, version=version)
    assert verdict.holds, verdict.failures
    assert verdict.tcb.startswith(product)
    assert ("microcode 209" in verdict.tcb, "fmc" in verdict.tcb) == (True, product == "Turin")
    assert any("revocation not checked" in note for note in verdict.notes)


def test_the_chip_number_may_be_wrapped_as_newer_certificates_do():
    assert verdict_on(HONEST.with_(wrapped_id=True)).holds


def test_it_is_attested_with_its_measurement_and_report_data():
    evidence = Evidence.of(HONEST.report(report_data=DATA), certificates=HONEST.chain)
    known = {"measurements": frozenset({b"\x11" * 48}), "chip_ids": frozenset({CHIP}), "minimum_svn": 4}
    policy = policy_of(**known, minimum_tcb={"snp": 8})
    assert attested(evidence, policy=policy, now=NOW, report_data=DATA).simulated
    with pytest.raises(TrustError) as refusal:
        attested(evidence, policy=policy, now=NOW, report_data=DATA[::-1])
    assert refusal.value.check == "report_data"
    with pytest.raises(UsageError, match="minimum_tcb"):
        attested(evidence, policy=policy_of(**known), now=NOW, report_data=DATA)


@pytest.mark.parametrize(
    ("more", "check"),
    [
        ({"measurements": frozenset({b"\x12" * 48})}, "measurement"),
        ({"measurements": frozenset({b"\x11" * 32})}, "measurement"),
        ({"signers": frozenset({b"\x07" * 48})}, "signer"),
        ({"chip_ids": frozenset({bytes(64)})}, "chip"),
        ({"minimum_svn": 5}, "svn"),
        ({"product": 0}, "product"),
        ({"minimum_tcb": {"snp": 9}}, "tcb"),
        ({"minimum_tcb": {"fmc": 0}}, "tcb"),
        ({"require_revocation": True}, "revocation"),
        ({"rtmr": {1: frozenset({bytes(48)})}}, "registers"),
    ],
)
def test_a_policy_is_kept(more, check):
    assert failures(accept=policy_of(**more)) == [check]


def test_a_policy_that_it_meets():
    policy = policy_of(
        signers=frozenset({b"\x07" * 48}), minimum_tcb={"bootloader": 3, "tee": 1, "snp": 8, "microcode": 209}
    )
    assert verdict_on(id_key=b"\x07" * 48, accept=policy).holds


@pytest.mark.parametrize(
    ("report", "check"),
    [
        ({"policy": 0x30000 | 1 << 19}, "debug"),
        ({"policy": 0x30000 | 1 << 18}, "migration"),
        ({"vmpl": 1}, "vmpl"),
        ({"vmpl": 4}, "vmpl"),
        ({"vmpl": 0xFFFFFFFF}, "vmpl"),
        ({"algorithm": 0}, "signature"),
        ({"algorithm": 2}, "signature"),
        ({"signing_key": 7}, "signature"),
        ({"signing_key": 2}, "signature"),
        ({"signing_key": 1}, "chain"),  # says VLEK, and there is a VCEK
        ({"key": leaf_key("another")}, "signature"),
        ({"tail": b"x"}, "signature"),
        ({"chip": CHIP[::-1]}, "chip"),
        ({"chip": bytes(64)}, "chip"),
        *(({"tcb": TCB[:at] + bytes((TCB[at] ^ 1,)) + TCB[at + 1 :]}, "tcb") for at in range(8)),
    ],
)
def test_a_report_that_says_something_else_is_refused(report, check):
    assert failures(**report) == [check]


def test_without_a_policy_each_level_of_a_guest_is_genuine_and_shown():
    policy = policy_of(highest_vmpl=3)
    assert [verdict_on(vmpl=level, accept=policy).holds for level in range(5)] == [True] * 4 + [False]


def leaf_with(*more, **values):
    return HONEST.with_(leaf_more=more, leaf_values=values)


WRONG_CHAINS = {
    "a leaf of another authority": (HONEST.with_(leaf_signer="stranger"), "chain"),
    "a leaf signed by the root": (HONEST.with_(leaf_signer="ark"), "chain"),
    "an authority of another root": (HONEST.with_(middle_signer="stranger"), "chain"),
    "an authority that may sign nothing": (HONEST.with_(middle_ca=False), "chain"),
    "a root of the same name with another key": (HONEST.with_(root_key="fake", middle_signer="fake"), "chain"),
    "a root's certificate that the root did not sign": (HONEST.with_(root_signer="fake"), "chain"),
    "a leaf that has expired": (HONEST.with_(days=(-10, -1)), "dates"),
    "a leaf of the future": (HONEST.with_(days=(1, 10)), "dates"),
    "an authority that has expired": (HONEST.with_(middle_days=(-10, -1)), "dates"),
    "a leaf that is an authority": (leaf_with((x509.BasicConstraints(ca=True, path_length=None), True)), "chain"),
    "a leaf that signs certificates": (leaf_with((usage(certs=True), True)), "chain"),
    "an unknown critical extension": (
        leaf_with((x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00"), True)),
        "chain",
    ),
    "a critical extension of AMD's": (
        leaf_with((x509.UnrecognizedExtension(x509.ObjectIdentifier(f"{AMD}.7"), b"\x05\x00"), True)),
        "chain",
    ),
    "a chip and a provider": (leaf_with(**{"5": b"\x16\x05cloud"}), "chain"),
    "neither": (leaf_with(**{"4": None}), "chain"),
    "half a chip": (leaf_with(**{"4": CHIP[:32]}), "chain"),
    "no TCB": (leaf_with(**{"3.3": None}), "chain"),
    "a negative TCB": (leaf_with(**{"3.3": b"\x02\x01\xf8"}), "chain"),
    "a long TCB": (leaf_with(**{"3.3": b"\x02\x02\x00\x08"}), "chain"),
    "a TCB that is no integer": (leaf_with(**{"3.3": b"\x04\x01\x08"}), "chain"),
    "another TCB": (leaf_with(**{"3.3": b"\x02\x01\x09"}), "tcb"),
    "another curve": (HONEST.with_(leaf_key=ec.generate_private_key(ec.SECP256R1())), "chain"),
}


@pytest.mark.parametrize("case", WRONG_CHAINS)
def test_a_wrong_chain_is_refused(case):
    foundry, check = WRONG_CHAINS[case]
    assert failures(foundry, root=HONEST, key=leaf_key()) == [check]


def test_a_root_that_has_expired_is_refused():
    foundry = HONEST.with_(root_days=(-10, -1))
    assert failures(foundry, root=foundry) == ["dates"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_chain_with_a_hole_is_refused(missing):
    certificates = tuple(each for at, each in enumerate(HONEST.chain) if at != missing)
    assert failures(certificates=certificates) == ["chain"]


def test_no_certificate_at_all_is_refused():
    evidence = Evidence.of(HONEST.report())
    assert [finding.check for finding in judge(evidence, policy=policy_of(), now=NOW).failures] == ["chain"]


def test_order_and_repetition_of_certificates_do_not_matter():
    certificates = (HONEST.root, HONEST.leaf, HONEST.middle)
    pem = b"".join(each.public_bytes(Encoding.PEM) for each in certificates)
    assert verdict_on(certificates=(pem, *der(*certificates[::-1]), pem + pem)).holds


def test_two_leaves_are_refused_because_nobody_knows_which_is_meant():
    other = HONEST.with_(leaf_key=leaf_key("another"))
    assert failures(certificates=(*HONEST.chain, *der(other.leaf))) == ["chain"]


def test_a_vlek_beside_the_vcek_is_not_looked_at():
    vlek = HONEST.with_(vlek=True, leaf_key=leaf_key("another"))
    assert verdict_on(certificates=(*HONEST.chain, *der(vlek.leaf, vlek.middle))).holds


def test_decoys_beside_the_chain_do_not_matter():
    decoys = HONEST.with_(root_key="fake", middle_key="stranger", middle_signer="fake")
    assert verdict_on(certificates=(*der(decoys.root, decoys.middle), *HONEST.chain)).holds


def test_a_chain_of_one_product_does_not_vouch_for_another():
    genoa = Foundry(product="Genoa", root_key="genoa", middle_signer="genoa")
    assert failures(genoa, root=HONEST) == ["chain"]
    # Turin orders the TCB in another way: the same eight bytes mean something else.
    assert failures(Foundry(product="Turin"), tcb=TCB) == ["tcb"]


def test_nobody_but_amd_is_trusted_without_the_insecure_setting():
    assert [
        finding.check
        for finding in judge(Evidence.of(HONEST.report(), certificates=HONEST.chain), policy=None, now=NOW).failures
    ] == ["chain"]
    assert key_hash(HONEST.root) not in AMD_ROOTS


class TestRevocation:
    def given(self, *lists, **named):
        return failures(certificates=(*HONEST.chain, *lists), **named)

    def test_a_current_list_that_names_nobody_is_checked(self):
        verdict = verdict_on(certificates=(*HONEST.chain, HONEST.crl(revoked=[4711])))
        assert verdict.holds
        assert "revocation" in [finding.check for finding in verdict.findings]
        assert not any("revocation not checked" in note for note in verdict.notes)

    def test_a_list_in_the_policy_counts_too(self):
        assert verdict_on(accept=policy_of(revocation_lists=(HONEST.crl(),), require_revocation=True)).holds
        assert failures(accept=policy_of(revocation_lists=(HONEST.crl(revoked=[65537]),))) == ["revocation"]

    def test_the_stricter_of_two_lists_decides(self):
        policy = policy_of(revocation_lists=(HONEST.crl(revoked=[65537]),))
        assert failures(certificates=(*HONEST.chain, HONEST.crl()), accept=policy) == ["revocation"]

    @pytest.mark.parametrize("serial", [65536, 65537])
    def test_whoever_is_on_it_is_refused(self, serial):
        assert self.given(HONEST.crl(revoked=[1234, serial])) == ["revocation"]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"signer": "stranger"},
            {"signer": "ask"},
            {"days": (-3, -1)},
            {"days": (1, 3)},
            {"critical": True},
            {"issuer": "ARK-Genoa"},
            {"issuer": "SEV-Milan"},
        ],
    )
    def test_a_list_that_is_none_is_refused(self, wrong):
        assert self.given(HONEST.crl(**wrong)) == ["revocation"]

    def test_a_list_of_another_product_beside_the_right_one_does_not_matter(self):
        assert self.given(HONEST.crl(), Foundry(product="Genoa").crl(signer="genoa", revoked=[65537])) == []


UNREADABLE = {
    "nothing": lambda: b"",
    "cut off": lambda: b"\x30\x03\x02\x01",
    "words": lambda: b"not a certificate",
    "PEM of nothing": lambda: b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    "PEM without an end": lambda: HONEST.leaf.public_bytes(Encoding.PEM)[:-40],
    "a private key": lambda: b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    "more behind it": lambda: HONEST.leaf.public_bytes(Encoding.DER) + b"\0",
    "a PEM bomb": lambda: b"-----BEGIN CERTIFICATE-----\n" * 2000,
    "deep nesting": lambda: b"\x30\x80" * 30_000,
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_no_certificate_cannot_be_read(case):
    with pytest.raises(TrustError) as refusal:
        verdict_on(certificates=(*HONEST.chain, UNREADABLE[case]()))
    assert refusal.value.check == "format"


def test_more_certificates_than_anybody_needs_cannot_be_read():
    many = b"".join(HONEST.with_(middle_serial=number).middle.public_bytes(Encoding.PEM) for number in range(1, 18))
    with pytest.raises(TrustError, match="more than 16"):
        verdict_on(certificates=(*HONEST.chain, many))


def refused(change, evidence, bit, policy):
    """Whether the evidence is refused, or cannot be read, with one bit of its quote changed."""
    quote = bytearray(evidence.quote)
    quote[bit // 8] ^= 1 << bit % 8
    try:
        return not judge(change(evidence, quote=bytes(quote)), policy=policy, now=NOW).holds
    except TrustError as error:
        return error.check == "format"


def test_bit_by_bit(full):
    """Every bit of the signed body (each seventh of them at a reduced count) and of r and s."""
    raw = HONEST.report(report_data=DATA)
    evidence, policy = Evidence.of(raw, certificates=HONEST.chain), policy_of(highest_vmpl=3)
    signed = range(0, 8 * 0x2A0, 1 if full else 7)
    signature = [8 * (0x2A0 + at) + bit for at in (0, 1, 47, 48, 71, 72, 119, 143, 144, 300, 511) for bit in (0, 7)]
    for bit in [*signed, *signature]:
        assert refused(replace, evidence, bit, policy), bit
    assert not refused(lambda evidence, **_: evidence, evidence, 0, policy)


def test_a_verifier_that_does_not_verify_would_be_noticed(monkeypatch):
    """The test above can fail: without the signature, bits that nothing else looks at could be changed."""
    evidence, policy = Evidence.of(HONEST.report(), certificates=HONEST.chain), policy_of(highest_vmpl=3)
    host_data = range(8 * 0xC0, 8 * 0xE0)
    assert all(refused(replace, evidence, bit, policy) for bit in host_data)
    monkeypatch.setattr("darknight.trust.snp._signature", lambda *_: holds("signature", "not looked at"))
    assert not any(refused(replace, evidence, bit, policy) for bit in host_data)


def test_the_foundry_uses_its_keys():
    """A control: what makes the reports honest is the signature of this root."""
    assert rsa_key("ark") is not rsa_key("fake")
    assert HONEST.root.not_valid_after_utc > at()
