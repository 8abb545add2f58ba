"""SGX and TDX quotes, by dcap-qvl under a strict policy. Measurements and report data are compared elsewhere.

The library's plain `verify` returns OutOfDate instead of raising, and takes whatever follows behind a quote. So the
quote is cut to its length, its TCB status is looked at here, and its root, its facts and its dates are compared with
what the library says that it verified. It is loaded when there is something to judge: most commands never do, and it
takes 2 MB.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from cryptography import x509

from darknight.errors import TrustError
from darknight.trust.certificates import MALFORMED
from darknight.trust.evidence import Evidence
from darknight.trust.findings import Finding, Judged, fails, holds
from darknight.trust.quote import SGX, Facts

if TYPE_CHECKING:
    import dcap_qvl

# SHA-384 of the public key (uncompressed point) of the Intel SGX Root CA.
INTEL_ROOT = bytes.fromhex(
    "46e403bd34f05a3f2817ab9badcaacc7ffc98e0f261008cd30dae936cace18d5dcf58eef31463613de1570d516200993"
)
UP_TO_DATE = "UpToDate"

_SIMULATED = "SIMULATED"  # in the names of a software platform's certificates
_PLATFORM = {"dynamic_platform": "dynamic platform", "cached_keys": "cached keys", "smt_enabled": "SMT"}
_OUT_OF_DATE = {"OutOfDate", "OutOfDateConfigurationNeeded"}
_FOR_EVER = 1 << 40  # seconds
_PLAIN_WORDS = {
    "CrlExpired": "a revocation list of the collateral has expired. Fetch the collateral again.",
    "CertExpired": "a certificate has expired.",
    "TCBInfo expired": "the collateral has expired. Fetch it again.",
}


def judge_intel(
    evidence: Evidence, facts: Facts, *, now: int, allow_status: Collection[str], simulated_root: bytes | None
) -> Judged:
    """Signatures, chain, dates, revocation and TCB of an Intel quote. simulated_root: DER, in place of Intel's own."""
    if evidence.collateral is None:
        words = "no collateral was given, and without it an Intel quote cannot be judged. Fetch it from Intel's PCS."
        return Judged(findings=(fails("collateral", words),))
    import dcap_qvl

    collateral = read_collateral(evidence.collateral)
    raw, verifier = evidence.quote[: facts.size], dcap_qvl.QuoteVerifier(simulated_root)
    try:
        claims = _verified(verifier, raw, collateral, now, dcap_qvl.QuotePolicy.claims_only(now))
    except TrustError as error:
        return Judged(findings=(fails(error.check, f"{error}{_hint(raw, simulated_root)}"),))
    status, pck = str(claims["tcb"]["status"]), claims["platform"]["pck"]
    shown = [words for key, words in _PLATFORM.items() if pck[key] == "True"]
    return Judged(
        findings=(
            holds("genuine", "signatures, certificates up to the root, dates and revocation lists are in order."),
            _root(claims, simulated_root),
            _dates(claims, now),
            _platform(claims, collateral),
            _agreement(claims, facts),
            _status(verifier, raw, collateral, now, status, allow_status),
        ),
        status=status,
        advisories=tuple(str(name) for name in claims["tcb"]["advisory_ids"]),
        tcb=f"CPU SVN {bytes(pck['cpu_svn']).hex()}, PCE SVN {pck['pce_svn']}, FMSPC {bytes(pck['fmspc']).hex()}",
        chip=bytes(pck["ppid"]),
        notes=(f"accepted as it is: {', '.join(shown)}.",) if shown else (),
    )


def read_collateral(content: bytes) -> dcap_qvl.QuoteCollateralV3:
    """Raises TrustError (check "format") if it is not Intel's collateral as JSON."""
    import dcap_qvl

    try:
        return dcap_qvl.QuoteCollateralV3.from_json(content.decode())
    except ValueError:
        raise TrustError(
            "the collateral cannot be read: it is not the JSON object of Intel's collateral. Fetch it again.",
            check="format",
        ) from None


def _verified(
    verifier: dcap_qvl.QuoteVerifier,
    raw: bytes,
    collateral: dcap_qvl.QuoteCollateralV3,
    now: int,
    policy: dcap_qvl.QuotePolicy,
) -> dict[str, Any]:
    """What the library verified. Raises TrustError (check "genuine"), in the library's words where we have none."""
    try:
        claims: dict[str, Any] = json.loads(verifier.verify_with_policy(raw, collateral, now, policy).to_json())
    except ValueError as error:
        said = " ".join(str(error).removeprefix("Verification failed: ").split())[:300].rstrip(".")
        plain = [words for key, words in _PLAIN_WORDS.items() if said.startswith(key)]
        raise TrustError(plain[0] if plain else f"{said}.", check="genuine") from None
    return claims


def _root(claims: dict[str, Any], simulated_root: bytes | None) -> Finding:
    if simulated_root is not None:
        return holds("root", "it leads to the root of the simulation.")
    if bytes(claims["platform"]["root_key_id"]) != INTEL_ROOT:
        return fails("root", "it leads to another root than Intel's.")
    return holds("root", "it leads to Intel's root.")


def _dates(claims: dict[str, Any], now: int) -> Finding:
    """Over everything that has a date: certificates, revocation lists, and both statements of the collateral."""
    issued = max(claims["latest_issue_date"], claims["qe_iden_latest_issue_date"])
    expires = min(claims["earliest_expiration_date"], claims["qe_iden_earliest_expiration_date"])
    if not issued <= now <= expires:
        return fails("dates", "a certificate or the collateral is not of this time.")
    return holds("dates", "certificates and collateral are of this time.")


def _platform(claims: dict[str, Any], collateral: dcap_qvl.QuoteCollateralV3) -> Finding:
    """FMSPC and PCE together name a kind of platform; the library compares the first alone."""
    stated = str(json.loads(collateral.tcb_info).get("pceId", ""))  # Intel's signature over it was verified
    if stated.lower() != bytes(claims["platform"]["pck"]["pce_id"]).hex():
        return fails("collateral", "the collateral is about another kind of platform.")
    return holds("collateral", "the collateral is about this kind of platform.")


def _agreement(claims: dict[str, Any], facts: Facts) -> Finding:
    """What we read from the quote is what was verified: two readers of one format must not differ."""
    (report,) = claims["report"].values()
    report = report.get("base", report)
    ours = {"report_data": facts.report_data.hex()}
    if facts.format == SGX:
        ours |= {"mr_enclave": facts.measurement.hex(), "mr_signer": (facts.signer or b"").hex()}
        same = (report["isv_prod_id"], report["isv_svn"]) == (facts.product, facts.svn)
    else:
        ours |= {f"rt_mr{number}": register.hex() for number, register in enumerate(facts.registers)}
        same = report["mr_td"] == facts.measurement.hex()
    same = same and all(report[name] == value for name, value in ours.items())
    if not same or claims["header"]["version"] != facts.version:
        return fails("agreement", "what we read from the quote is not what was verified.")
    return holds("agreement", "what is shown is what was verified.")


def _status(
    verifier: dcap_qvl.QuoteVerifier,
    raw: bytes,
    collateral: dcap_qvl.QuoteCollateralV3,
    now: int,
    status: str,
    allow_status: Collection[str],
) -> Finding:
    """The strict policy: UpToDate, or a status that the client allows by name."""
    if status != UP_TO_DATE and status not in allow_status:
        return fails("tcb", f"the TCB status is {status}; needed is UpToDate, or a status that you allow by name.")
    import dcap_qvl

    policy = dcap_qvl.QuotePolicy.strict(now).allow_dynamic_platform(True).allow_cached_keys(True).allow_smt(True)
    for name in allow_status:
        policy = policy.allow_status(name)
    if _OUT_OF_DATE & set(allow_status):
        policy = policy.platform_grace_period(_FOR_EVER).qe_grace_period(_FOR_EVER)
    try:
        _verified(verifier, raw, collateral, now, policy)
    except TrustError as error:
        return fails("tcb", str(error))
    return holds("tcb", f"the TCB status is {status}.")


def _hint(raw: bytes, simulated_root: bytes | None) -> str:
    """Somebody who tries the software platform forgets its root more often than anything else."""
    import dcap_qvl

    try:
        chain = x509.load_pem_x509_certificates(dcap_qvl.parse_quote(raw).cert_chain_pem_bytes() or b"")
        names = " ".join(each.subject.rfc4514_string() for each in chain)
    except MALFORMED:
        return ""
    if simulated_root is None and _SIMULATED in names:
        return " It is SIMULATED: a software platform made it, and its root is trusted by an insecure_ setting alone."
    return ""
