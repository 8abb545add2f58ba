"""What a verdict on evidence looks like: the facts, each check, and what was not looked at."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from darknight.trust.verify import Verdict

_NAMES = {
    "sgx": ("SGX quote", "MRENCLAVE", "MRSIGNER"),
    "tdx": ("TDX quote", "MRTD", ""),
    "snp": ("SEV-SNP report", "measurement", "id key"),
}


def evidence_table(verdict: Verdict) -> Table:
    """Fits 80 characters; says SIMULATED at its top if that is what it is."""
    name, _, _ = _NAMES[verdict.facts.format]
    table = Table(
        box=box.ROUNDED,
        width=80,
        title=f"{'SIMULATED ' * verdict.simulated}{name}, version {verdict.facts.version}: "
        f"{'it holds' if verdict.holds else 'REFUSED'}",
        title_style="bold" if verdict.holds else "bold red",
        show_header=False,
        padding=(0, 1),
    )
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for what, value in _facts(verdict):
        table.add_row(what, Text(value))
    table.add_section()
    for finding in verdict.findings:
        sign = Text("✓ ", "green") if finding.holds else Text("✗ ", "bold red")
        table.add_row(sign.append(finding.check), Text(finding.words))
    table.add_section()
    if not verdict.holds:
        table.add_row(Text("●", "bold red"), Text("it is refused: what it says of itself above may be untrue."))
    for note in verdict.notes:
        table.add_row(Text("●", "yellow"), Text(note))
    return table


def _facts(verdict: Verdict) -> Iterator[tuple[str, str]]:
    facts = verdict.facts
    _, measurement, signer = _NAMES[facts.format]
    yield measurement, facts.measurement.hex()
    for number, register in enumerate(facts.registers):
        yield f"RTMR{number}", register.hex()
    if facts.signer is not None:
        yield signer, facts.signer.hex()
    if facts.product is not None:
        yield "product, SVN", f"{facts.product}, {facts.svn}"
    elif facts.svn is not None:
        yield "guest SVN", str(facts.svn)
    yield "report data", facts.report_data.hex()
    yield "debug", "YES" if facts.debug else "no"
    if facts.privilege is not None:
        yield "VMPL", str(facts.privilege)
    if verdict.status is not None:
        yield "TCB status", verdict.status
    if verdict.advisories:
        yield "advisories", ", ".join(verdict.advisories)
    if verdict.tcb is not None:
        yield "TCB", verdict.tcb
    if verdict.chip is not None:
        yield "chip", verdict.chip.hex()
