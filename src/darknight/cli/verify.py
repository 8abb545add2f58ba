"""darknight verify: the flags, and what is shown."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from darknight.cli.evidence_table import evidence_table
from darknight.cli.messages import option
from darknight.errors import TrustError, UsageError
from darknight.trust.evidence import MAX_CERTIFICATE_BYTES, MAX_COLLATERAL_BYTES, Evidence
from darknight.trust.policy import Policy, read_policy
from darknight.trust.quote import MAX_QUOTE_BYTES, REPORT_DATA_BYTES
from darknight.trust.verify import Verdict, judge

_EVIDENCE, _POLICY, _OUTPUT = "Evidence", "What is accepted", "Output"


def verify(
    quote: Annotated[
        Path, typer.Argument(help="SGX or TDX quote, or SEV-SNP report, as the machine gave it.", show_default=False)
    ],
    collateral: Annotated[Path | None, option(_EVIDENCE, "Intel's collateral for an SGX or TDX quote, JSON.")] = None,
    certs: Annotated[
        list[Path] | None,
        option(_EVIDENCE, "For SNP: VCEK or VLEK, ASK and ARK, and AMD's revocation list; PEM or DER. Repeatable."),
    ] = None,
    now: Annotated[int | None, option(_EVIDENCE, "Judge as of this time, Unix seconds.  [default: now]")] = None,
    policy: Annotated[
        Path | None, option(_POLICY, "TOML file: measurements, signers and more.  [default: any program]")
    ] = None,
    allow_status: Annotated[
        list[str] | None,
        option(_POLICY, "A TCB status of Intel besides UpToDate, such as SWHardeningNeeded. Repeatable."),
    ] = None,
    report_data: Annotated[str | None, option(_POLICY, "What the 64 bytes must be, in hexadecimal digits.")] = None,
    insecure_simulated_root: Annotated[
        Path | None, option(_POLICY, "Trust a software platform, by its root certificate. It protects nothing.")
    ] = None,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the table.", "--json")] = False,
) -> None:
    """Judge what a machine shows for itself: an SGX or TDX quote, or a SEV-SNP report.

    It says what the evidence is (measurement, report data, TCB, debug mode) and checks signature, certificates up to
    the pinned root of Intel or AMD, dates, revocation, TCB status and debug mode. Without --policy any genuine program
    passes: no measurement is compared. Nothing is fetched; the network is not used.

    Example, an enclave that must be the one you built:

        darknight verify quote.bin --collateral collateral.json \\
          --policy enclave.toml

    A SEV-SNP report with its chain, from the machine or from AMD:

        darknight verify report.bin --certs vcek.der --certs ask_ark.pem

    In a policy file, measurements = ["..."] is what matters; docs/howto/verify-evidence.md has the rest.

    Exit codes: 0 everything holds, 1 something does not, or what it takes to judge is missing (collateral, chain),
    2 bad usage, or a file that cannot be read: no quote, cut off, not there; 130 interrupted.
    """
    wanted = _policy(policy, allow_status or [], insecure_simulated_root)
    expected = None if report_data is None else _report_data(report_data)
    verdict = _judged(
        _read(quote, MAX_QUOTE_BYTES),
        None if collateral is None else _read(collateral, MAX_COLLATERAL_BYTES),
        tuple(_read(path, MAX_CERTIFICATE_BYTES) for path in certs or []),
        policy=wanted,
        now=int(time.time()) if now is None else now,
        report_data=expected,
    )
    if json:
        print(dumps(verdict.to_words(), indent=2))
    else:
        Console(highlight=False, emoji=False).print(evidence_table(verdict))
    if not verdict.holds:
        words = "; ".join(f"{finding.check}: {finding.words}" for finding in verdict.failures)
        raise TrustError(f"refused. {words}", check=verdict.failures[0].check)


def _judged(
    quote: bytes,
    collateral: bytes | None,
    certificates: tuple[bytes, ...],
    *,
    policy: Policy | None,
    now: int,
    report_data: bytes | None,
) -> Verdict:
    """What cannot be read at all is bad usage, not evidence that was refused."""
    try:
        evidence = Evidence.of(quote, collateral=collateral, certificates=certificates)
        return judge(evidence, policy=policy, now=now, report_data=report_data)
    except TrustError as error:
        raise UsageError(str(error)) from None


def _policy(path: Path | None, allow_status: list[str], simulated_root: Path | None) -> Policy | None:
    found = None if path is None else read_policy(path)
    if allow_status or simulated_root is not None:
        # As without a policy, nothing is compared that is the client's to choose.
        found = Policy(highest_vmpl=3) if found is None else found
        found = replace(found, allow_status=found.allow_status | frozenset(allow_status))
    if found is not None and simulated_root is not None:
        found = replace(found, insecure_simulated_root=_read(simulated_root, MAX_CERTIFICATE_BYTES))
    return found


def _report_data(text: str) -> bytes:
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * REPORT_DATA_BYTES}}}", text):
        raise UsageError(f"--report-data: needs {2 * REPORT_DATA_BYTES} hexadecimal digits.")
    return bytes.fromhex(text)


def _read(path: Path, limit: int) -> bytes:
    """At most `limit` bytes: nobody's file fills the memory, and no pipe holds us up."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Check the path.") from None
    if content is None or len(content) > limit:
        raise UsageError(f"{path} is not a file of at most {limit:,} bytes. Give the right one.")
    return content
