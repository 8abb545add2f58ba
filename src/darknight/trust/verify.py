"""The verifier: is evidence genuine, and is it what a client's policy wants?

    judge      every check with its outcome, for people
    attested   raises unless everything holds; the only way to an enclave that keys may be released to

Guarantees: `attested` returns only for evidence whose signatures lead to the pinned root of Intel or AMD (or to a root
that the policy names by a setting that begins with insecure_), at the client's own time, not in debug mode, with a
measurement of the policy and exactly the report data that the client expects. A single changed bit of header or body
is refused. Contract tests: tests/trust/test_verify.py, tests/trust/test_samples.py, tests/trust/test_attacks.py,
tests/trust/test_snp.py.
Assumes: that the vendor's keys are secret, that its processors keep what they measure to themselves, and that the
client's clock is right. It does not exclude an owner who opens the machine (SECURITY.md): `chip_ids` names machines.
Leaks: nothing; evidence is public.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from darknight.errors import TrustError, UsageError
from darknight.trust.certificates import read_root, without_warnings
from darknight.trust.evidence import Evidence
from darknight.trust.findings import Finding, fails, holds
from darknight.trust.intel import judge_intel
from darknight.trust.policy import Policy
from darknight.trust.quote import REPORT_DATA_BYTES, SNP, TDX, Facts
from darknight.trust.snp import judge_snp

SIMULATED = "SIMULATED: a program signed this, not a processor. It protects nothing."

# Without a policy nothing is compared that is the client's to choose; an SNP guest has four levels.
_GENUINE = Policy(highest_vmpl=3)
_TD_REGISTERS = {1, 2}  # they measure what a TD starts: the kernel, its command line and its files
_LAST_SECOND = 253402300799  # of the year 9999


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found about one piece of evidence. It holds only if every finding does.

    status: Intel's word for the TCB. tcb: its security versions. chip: what identifies the machine. notes: what was
    accepted or not looked at, and should be known.
    """

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
        return bool(self.findings) and not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.holds)

    def to_words(self) -> dict[str, object]:
        """For JSON."""
        facts = self.facts
        return {
            "holds": self.holds,
            "simulated": self.simulated,
            "format": facts.format,
            "version": facts.version,
            "measurement": facts.measurement.hex(),
            "registers": [register.hex() for register in facts.registers],
            "signer": None if facts.signer is None else facts.signer.hex(),
            "product": facts.product,
            "svn": facts.svn,
            "report_data": facts.report_data.hex(),
            "debug": facts.debug,
            "vmpl": facts.privilege,
            "chip": None if self.chip is None else self.chip.hex(),
            "tcb": {"status": self.status, "advisories": list(self.advisories), "versions": self.tcb},
            "findings": [
                {"check": finding.check, "holds": finding.holds, "words": finding.words} for finding in self.findings
            ],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class Attested:
    """Evidence that holds: `verdict` says what was checked. Only `attested` makes one."""

    verdict: Verdict

    @property
    def measurement(self) -> bytes:
        return self.verdict.facts.measurement

    @property
    def simulated(self) -> bool:
        return self.verdict.simulated


def judge(evidence: Evidence, *, policy: Policy | None, now: int, report_data: bytes | None = None) -> Verdict:
    """Every check that applies. Without a policy: whether the evidence is genuine, of whatever program.

    now: the client's own time, in Unix seconds. report_data: what the 64 bytes must be, if that is known.
    Raises TrustError (check "format") if the collateral or a certificate cannot be read.
    """
    if not 0 <= now <= _LAST_SECOND:
        raise UsageError(f"the time {now} is not one of this age; needs Unix seconds.")
    if report_data is not None and len(report_data) != REPORT_DATA_BYTES:
        raise UsageError(f"report data of {len(report_data)} bytes; needs {REPORT_DATA_BYTES}.")
    facts, wanted = evidence.facts, _GENUINE if policy is None else policy
    with without_warnings():
        root = None if wanted.insecure_simulated_root is None else read_root(wanted.insecure_simulated_root)
        if facts.format == SNP:
            judged = judge_snp(evidence, facts, policy=wanted, now=now, simulated_root=root)
        else:
            judged = judge_intel(evidence, facts, now=now, allow_status=wanted.allow_status, simulated_root=root)
    findings = [*judged.findings, _debug(facts), *_wanted(facts, judged.chip, wanted)]
    if report_data is not None:
        same = hmac.compare_digest(facts.report_data, report_data)
        findings.append(_compared("report_data", same, "the report data", "what was expected"))
    return Verdict(
        facts=facts,
        findings=tuple(findings),
        notes=(*judged.notes, *_notes(evidence, wanted, simulated=root is not None)),
        status=judged.status,
        advisories=judged.advisories,
        tcb=judged.tcb,
        chip=judged.chip,
        simulated=root is not None,
    )


def attested(evidence: Evidence, *, policy: Policy, now: int, report_data: bytes) -> Attested:
    """Evidence that holds in every respect, for exactly this report data. Raises TrustError on any other.

    Raises UsageError if the policy does not say which program may have the keys.
    """
    if not policy.measurements:
        raise UsageError("the policy names no measurement, and no key goes to an unknown program. Add measurements.")
    if evidence.format == TDX and not set(policy.rtmr) >= _TD_REGISTERS:
        raise UsageError("MRTD measures a TD's firmware alone. Add to the policy what RTMR 1 and 2 must be, [rtmr].")
    if evidence.format == SNP and not policy.minimum_tcb:
        raise UsageError("AMD does not say which firmware is too old: the policy must, in [minimum_tcb].")
    verdict = judge(evidence, policy=policy, now=now, report_data=report_data)
    if not verdict.holds:
        words = " ".join(f"{finding.check}: {finding.words}" for finding in verdict.failures)
        raise TrustError(f"the evidence is refused. {words}", check=verdict.failures[0].check)
    return Attested(verdict=verdict)


def _debug(facts: Facts) -> Finding:
    if facts.debug:
        return fails("debug", "it is in debug mode: whoever runs the machine can read all of its memory.")
    return holds("debug", "it is not in debug mode.")


def _wanted(facts: Facts, chip: bytes | None, policy: Policy) -> list[Finding]:
    """What the client's policy asks for beyond genuine evidence."""
    one = "one of the policy's"
    found = []
    if policy.measurements:
        found.append(_compared("measurement", _among(facts.measurement, policy.measurements), "the measurement", one))
    for number, values in sorted(policy.rtmr.items()):
        same = len(facts.registers) > number and _among(facts.registers[number], values)
        found.append(_compared("registers", same, f"RTMR {number}", one))
    if policy.signers:
        found.append(_compared("signer", _among(facts.signer, policy.signers), "the signer", one))
    if policy.product is not None:
        found.append(_compared("product", facts.product == policy.product, "the product id", "the policy's"))
    if policy.minimum_svn:
        enough = facts.svn is not None and facts.svn >= policy.minimum_svn
        found.append(_compared("svn", enough, "the security version", f"{policy.minimum_svn} or more"))
    if policy.chip_ids:
        found.append(_compared("chip", _among(chip, policy.chip_ids), "the chip", one))
    return found


def _notes(evidence: Evidence, policy: Policy, *, simulated: bool) -> list[str]:
    found = []
    if not policy.measurements:
        found.append("no measurement was compared: this says nothing about which program runs there.")
    if policy.configurations:
        found.append("the configuration is not in a quote: it is compared when keys are released.")
    if evidence.format == SNP and evidence.collateral is not None:
        found.append("the collateral was not used: it is for Intel's quotes.")
    if evidence.format != SNP and evidence.certificates:
        found.append("the certificates were not used: Intel's quotes bring their own.")
    if simulated:
        found.append(SIMULATED)
    return found


def _among(value: bytes | None, values: Iterable[bytes]) -> bool:
    return value is not None and any(hmac.compare_digest(value, each) for each in values)


def _compared(check: str, same: bool, what: str, needed: str) -> Finding:
    return holds(check, f"{what} is {needed}.") if same else fails(check, f"{what} is not {needed}.")
