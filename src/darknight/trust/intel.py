"""SGX and TDX quotes, by dcap-qvl under a strict policy. Measurements and report data are compared elsewhere."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import dcap_qvl
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from darknight.errors import TrustError
from darknight.trust.evidence import Evidence
from darknight.trust.findings import Finding, Judged, fails, holds
from darknight.trust.quote import SGX, Facts

_PLATFORM = {"dynamic_platform": "dynamic platform", "cached_keys": "cached keys", "smt_enabled": "SMT"}
_UP_TO_DATE = "UpToDate"


def judge_intel(
    evidence: Evidence, facts: Facts, *, now: int, allow_status: Collection[str], simulated_root: bytes | None
) -> Judged:
    """Signatures, chain, dates, revocation and TCB of an Intel quote. simulated_root: DER, in place of Intel's own."""
    if evidence.collateral is None:
        words = "no collateral was given, and without it an Intel quote cannot be judged. Fetch it from Intel's PCS."
        return Judged(findings=(fails("collateral", words),))
    collateral = read_collateral(evidence.collateral)
    raw, verifier = evidence.quote[: facts.size], dcap_qvl.QuoteVerifier(simulated_root)
    try:
        claims = verifier.verify_with_policy(raw, collateral, now, dcap_qvl.QuotePolicy.claims_only(now))
    except ValueError as error:
        return Judged(findings=(fails("genuine", _reason(error)),))
    found = json.loads(claims.to_json())
    status, pck = str(found["tcb"]["status"]), found["platform"]["pck"]
    findings = [
        holds("genuine", "signatures, certificates up to the root, dates and revocation lists are in order."),
        _same_facts(found, facts),
        _accepted(verifier, raw, collateral, now, status, allow_status),
    ]
    shown = [words for key, words in _PLATFORM.items() if pck[key] == "True"]
    return Judged(
        findings=tuple(findings),
        status=status,
        advisories=tuple(str(name) for name in found["tcb"]["advisory_ids"]),
        tcb=f"CPU SVN {bytes(pck['cpu_svn']).hex()}, PCE SVN {pck['pce_svn']}, FMSPC {bytes(pck['fmspc']).hex()}",
        chip=bytes(pck["ppid"]),
        notes=(f"accepted as it is: {', '.join(shown)}.",) if shown else (),
    )


def read_collateral(content: bytes) -> dcap_qvl.QuoteCollateralV3:
    """Raises TrustError (check "format") if it is not Intel's collateral as JSON."""
    try:
        return dcap_qvl.QuoteCollateralV3.from_json(content.decode())
    except ValueError:
        raise TrustError(
            "the collateral cannot be read: it is not the JSON object of Intel's collateral. Fetch it again.",
            check="format",
        ) from None


def read_root(content: bytes) -> bytes:
    """A root certificate, PEM or DER, as DER. Raises TrustError (check "format") on anything else."""
    try:
        load = x509.load_pem_x509_certificate if content.startswith(b"-----") else x509.load_der_x509_certificate
        return load(content).public_bytes(Encoding.DER)
    except ValueError:
        raise TrustError("the root certificate cannot be read: it is neither PEM nor DER.", check="format") from None


def _accepted(
    verifier: dcap_qvl.QuoteVerifier,
    raw: bytes,
    collateral: dcap_qvl.QuoteCollateralV3,
    now: int,
    status: str,
    allow_status: Collection[str],
) -> Finding:
    """The strict policy: UpToDate, or a status that the client allows by name."""
    policy = dcap_qvl.QuotePolicy.strict(now).allow_dynamic_platform(True).allow_cached_keys(True).allow_smt(True)
    for name in allow_status:
        policy = policy.allow_status(name)
    if status != _UP_TO_DATE and status not in allow_status:
        return fails("tcb", f"the TCB status is {status}; needed is UpToDate, or a status that you allow by name.")
    try:
        verifier.verify_with_policy(raw, collateral, now, policy)
    except ValueError as error:
        return fails("tcb", _reason(error))
    return holds("tcb", f"the TCB status is {status}.")


def _same_facts(claims: dict[str, Any], facts: Facts) -> Finding:
    """What we read from the quote is what was verified: two readers of one format must not differ."""
    (report,) = claims["report"].values()
    if facts.format == SGX:
        same = (report["mr_enclave"], report["mr_signer"], report["report_data"]) == (
            facts.measurement.hex(),
            (facts.signer or b"").hex(),
            facts.report_data.hex(),
        )
    else:
        registers = tuple(report[f"rt_mr{number}"] for number in range(4))
        same = (report["mr_td"], report["report_data"]) == (facts.measurement.hex(), facts.report_data.hex())
        same = same and registers == tuple(register.hex() for register in facts.registers)
    if same:
        return holds("agreement", "what is shown is what was verified.")
    return fails("agreement", "what we read from the quote is not what was verified.")


def _reason(error: ValueError) -> str:
    """The verifier's own words, in one line."""
    return " ".join(str(error).removeprefix("Verification failed: ").split())[:300] + "."
