"""SEV-SNP reports: a small verifier with AMD's roots pinned by the hash of their keys.

The chain: VCEK (the chip's key at this TCB) or VLEK (one that AMD gave to a cloud provider), signed by the ASK or ASVK,
signed by the ARK. Versions 2 to 5 of the report have what is needed here at the same places.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from darknight.errors import TrustError
from darknight.trust.certificates import Bag, read_bag
from darknight.trust.evidence import Evidence
from darknight.trust.findings import Finding, Judged, fails, holds
from darknight.trust.policy import Policy
from darknight.trust.quote import SNP_SIGNED_BYTES, Facts
from darknight.trust.snp_chain import TURIN, Chain, check_revocation, find_chain

_VCEK, _VLEK = 0, 1
_COMPONENT_BYTES = 72
_SIGNATURE = slice(SNP_SIGNED_BYTES, SNP_SIGNED_BYTES + 2 * _COMPONENT_BYTES)
_TCB = slice(0x180, 0x188)
_ECDSA_P384_SHA384 = 1
_LEVELS = 4  # VMPL 0 to 3; a report that the hypervisor asked for has another number


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What the verifier needs from a report, beside the facts."""

    signing_key: int
    algorithm: int
    tcb: bytes
    smt: bool
    migration: bool


def judge_snp(evidence: Evidence, facts: Facts, *, policy: Policy, now: int, simulated_root: bytes | None) -> Judged:
    """Signature, chain, dates, chip and TCB of an SNP report; the revocation list where there is one."""
    report = _read(evidence.quote)
    bag = read_bag((*evidence.certificates, *policy.revocation_lists))
    try:
        chain = find_chain(bag, vlek=report.signing_key == _VLEK, now=now, simulated_root=simulated_root)
    except TrustError as error:
        return Judged(findings=(fails(error.check, str(error)),))
    tcb = tcb_parts(report.tcb, turin=chain.product == TURIN)
    findings = [
        holds("chain", f"{chain.kind} of {chain.product}: its certificates lead to the root and are of this time."),
        _signature(evidence.quote, report, chain),
        _chip(facts, chain),
        _tcb(report, tcb, chain, policy),
        _privilege(facts, policy),
        _migration(report),
    ]
    notes = ["AMD publishes no TCB status: minimum_tcb in a policy says what you accept."]
    if report.smt:
        notes.append("accepted as it is: SMT.")
    if bag.lists or policy.require_revocation:
        findings.append(_revocation(bag, chain, now))
    else:
        notes.append("revocation not checked: no revocation list was given.")
    words = ", ".join(f"{name} {value}" for name, value in tcb.items())
    return Judged(findings=tuple(findings), tcb=f"{chain.product}: {words}", chip=facts.chip, notes=tuple(notes))


def tcb_parts(tcb: bytes, *, turin: bool) -> dict[str, int]:
    """The eight bytes of a TCB version by name; Turin orders them in another way, and has one more."""
    if turin:
        return {"fmc": tcb[0], "bootloader": tcb[1], "tee": tcb[2], "snp": tcb[3], "microcode": tcb[7]}
    return {"bootloader": tcb[0], "tee": tcb[1], "snp": tcb[6], "microcode": tcb[7]}


def _read(raw: bytes) -> _Report:
    (policy,) = struct.unpack_from("<Q", raw, 8)
    (flags,) = struct.unpack_from("<I", raw, 0x48)
    return _Report(
        signing_key=flags >> 2 & 7,
        algorithm=struct.unpack_from("<I", raw, 0x34)[0],
        tcb=raw[_TCB],
        smt=bool(policy >> 16 & 1),
        migration=bool(policy >> 18 & 1),
    )


def _signature(raw: bytes, report: _Report, chain: Chain) -> Finding:
    if report.signing_key not in (_VCEK, _VLEK):
        return fails("signature", "the report is not signed.")
    if report.algorithm != _ECDSA_P384_SHA384:
        return fails("signature", "the report is signed by an unknown algorithm; needs ECDSA on P-384.")
    r, s = (int.from_bytes(raw[_SIGNATURE][at : at + _COMPONENT_BYTES], "little") for at in (0, _COMPONENT_BYTES))
    if any(raw[_SIGNATURE.stop :]):
        return fails("signature", "something follows behind the signature.")
    try:
        chain.key.verify(encode_dss_signature(r, s), raw[:SNP_SIGNED_BYTES], ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return fails("signature", "the signature is not of this report and this key.")
    return holds("signature", f"the report is signed by the {chain.kind}.")


def _chip(facts: Facts, chain: Chain) -> Finding:
    if chain.hardware_id is None:
        return holds("chip", "the key belongs to a cloud provider, not to one chip.")
    chip = facts.chip or b""
    if not any(chip):
        return fails("chip", "the report hides its chip id, so it cannot be compared with the certificate's.")
    if chip != chain.hardware_id.ljust(len(chip), b"\0"):
        return fails("chip", "the chip of the report is not the chip of the certificate.")
    return holds("chip", "the chip of the report is the chip of the certificate.")


def _tcb(report: _Report, tcb: dict[str, int], chain: Chain, policy: Policy) -> Finding:
    if report.tcb != chain.tcb:
        return fails("tcb", "the TCB that the report states is not the one of the certificate.")
    low = [name for name, least in policy.minimum_tcb.items() if tcb.get(name, -1) < least]
    if low:
        return fails("tcb", f"{', '.join(sorted(low))} of the TCB is older than the policy's minimum_tcb.")
    return holds("tcb", "the TCB that the report states is the one of the certificate.")


def _migration(report: _Report) -> Finding:
    """The host chooses the migration agent, and an agent can read what it moves."""
    if report.migration:
        return fails("migration", "the guest lets a migration agent of the host move it, and so read it.")
    return holds("migration", "no migration agent may move the guest.")


def _revocation(bag: Bag, chain: Chain, now: int) -> Finding:
    try:
        check_revocation(bag, chain, now=now)
    except TrustError as error:
        return fails("revocation", str(error))
    return holds("revocation", "a current list of the root names none of its certificates.")


def _privilege(facts: Facts, policy: Policy) -> Finding:
    level = facts.privilege
    if level is None or level >= _LEVELS:
        return fails("vmpl", "the report was not asked for by a guest.")
    if level > policy.highest_vmpl:
        return fails("vmpl", f"VMPL {level}; the policy accepts at most {policy.highest_vmpl}.")
    return holds("vmpl", f"VMPL {level}.")
