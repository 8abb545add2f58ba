"""The verifier: is evidence genuine, and is it what a client's policy wants?

judge      every check with its outcome, for people
attested   raises unless everything holds; the only way to what a key may be released to
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from darknight.errors import TrustError, UsageError
from darknight.trust.evidence import Evidence
from darknight.trust.findings import Finding, fails, holds
from darknight.trust.intel import judge_intel, read_root
from darknight.trust.policy import Policy
from darknight.trust.quote import REPORT_DATA_BYTES, SNP, TDX, Facts
from darknight.trust.snp import judge_snp

_TD_REGISTERS = (1, 2)  # RTMR1 and RTMR2 measure what is started: the kernel, its command line and its files


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found about one piece of evidence. It holds only if every finding does."""

    facts: Facts
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    status: str | None
    advisories: tuple[str, ...]
    tcb: str | None
    chip: bytes | None
    simulated: bool

    @property
    def holds(self) -> bool:
        return bool(self.findings) and all(finding.holds for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.holds)


@dataclass(frozen=True, kw_only=True)
class Attested:
    """Evidence that holds: `verdict` says what was checked. Made by `attested` alone."""

    verdict: Verdict

    @property
    def measurement(self) -> bytes:
        return self.verdict.facts.measurement

    @property
    def simulated(self) -> bool:
        return self.verdict.simulated


def judge(evidence: Evidence, *, policy: Policy | None, now: int) -> Verdict:
    """Every check that applies. Without a policy: whether the evidence is genuine, of whatever program.

    Raises TrustError (check "format") if the evidence, or a certificate in it, cannot be read.
    """
    wanted = policy if policy is not None else Policy()
    facts, root = evidence.facts, wanted.insecure_simulated_root
    simulated_root = None if root is None else read_root(root)
    if facts.format == SNP:
        judged = judge_snp(evidence, facts, policy=wanted, now=now, simulated_root=simulated_root)
    else:
        judged = judge_intel(evidence, facts, now=now, allow_status=wanted.allow_status, simulated_root=simulated_root)
    findings, notes = [*judged.findings, _debug(facts)], list(judged.notes)
    if policy is not None:
        findings += _wanted(facts, judged.chip, policy)
    if not wanted.measurements:
        notes.append("no measurement was compared: this says nothing about which program runs there.")
    if simulated_root is not None:
        notes.append("SIMULATED: a program signed this, not a processor. It protects nothing.")
    return Verdict(
        facts=facts,
        findings=tuple(findings),
        notes=tuple(notes),
        status=judged.status,
        advisories=judged.advisories,
        tcb=judged.tcb,
        chip=judged.chip,
        simulated=simulated_root is not None,
    )


def attested(evidence: Evidence, *, policy: Policy, now: int, report_data: bytes) -> Attested:
    """Evidence that holds in every respect, for exactly this report data. Raises TrustError on any other."""
    if not policy.measurements:
        raise UsageError("the policy names no measurement, and no key goes to an unknown program. Add measurements.")
    if len(report_data) != REPORT_DATA_BYTES:
        raise UsageError(f"report data of {len(report_data)} bytes; needs {REPORT_DATA_BYTES}.")
    verdict = judge(evidence, policy=policy, now=now)
    if verdict.facts.format == TDX and not set(_TD_REGISTERS) <= set(policy.rtmr):
        raise UsageError("MRTD measures a TD's firmware alone. Add what RTMR 1 and 2 must be to the policy, [rtmr].")
    if verdict.failures:
        words = " ".join(f"{finding.check}: {finding.words}" for finding in verdict.failures)
        raise TrustError(f"the evidence is refused. {words}", check=verdict.failures[0].check)
    if not hmac.compare_digest(verdict.facts.report_data, report_data):
        raise TrustError("the evidence was made for another occasion: its report data differ.", check="report_data")
    return Attested(verdict=verdict)


def _debug(facts: Facts) -> Finding:
    if facts.debug:
        return fails("debug", "it is in debug mode: whoever runs the machine can read all of its memory.")
    return holds("debug", "it is not in debug mode.")


def _wanted(facts: Facts, chip: bytes | None, policy: Policy) -> list[Finding]:
    """What the client's policy asks for beyond genuine evidence."""
    found = []
    if policy.measurements:
        same = any(hmac.compare_digest(facts.measurement, value) for value in policy.measurements)
        found.append(_compared("measurement", same, "the measurement", "one of the policy's"))
    for number, values in sorted(policy.rtmr.items()):
        same = len(facts.registers) > number and facts.registers[number] in values
        found.append(_compared("registers", same, f"RTMR {number}", "one of the policy's"))
    if policy.signers:
        found.append(_compared("signer", facts.signer in policy.signers, "the signer", "one of the policy's"))
    if policy.product is not None:
        found.append(_compared("product", facts.product == policy.product, "the product id", "the policy's"))
    if policy.minimum_svn:
        enough = facts.svn is not None and facts.svn >= policy.minimum_svn
        found.append(_compared("svn", enough, "the security version", f"{policy.minimum_svn} or more"))
    if policy.chip_ids:
        found.append(_compared("chip", chip in policy.chip_ids, "the chip", "one of the policy's"))
    return found


def _compared(check: str, same: bool, what: str, needed: str) -> Finding:
    return holds(check, f"{what} is {needed}.") if same else fails(check, f"{what} is not {needed}.")
