"""The table at the end of `darknight audit`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from darknight.audit import Audit, Finding, Must
from darknight.report.gauge import number


def audit_table(audit: Audit, files: Mapping[str, Path]) -> Table:
    """One row for each finding; it fits 80 characters."""
    table = Table(
        box=box.ROUNDED,
        width=80,
        title=f"{'quick ' * audit.quick}audit on {escape(audit.data)}: "
        f"{'everything is as it must be' if audit.passed else 'NOT PASSED'}",
        title_style="bold" if audit.passed else "bold red",
        caption_justify="left",
        caption="\n".join(escape(str(path)) for path in files.values()),
        padding=(0, 1),
    )
    table.add_column("attacked", ratio=1)
    table.add_column("measured, 95 % interval", no_wrap=True)
    table.add_column("guessing", justify="right", no_wrap=True)
    table.add_column("the attack", no_wrap=True)
    for count, each in enumerate(audit.attacks, 1):
        table.add_row(f"[bold]{count}. {escape(each.attack.title)}[/]", "", "", "")
        for finding in each.findings:
            table.add_row(
                escape(finding.target),
                escape(f"{number(finding.value)} [{number(finding.low)}, {number(finding.high)}]"),
                number(finding.guessing),
                _verdict(finding),
                end_section=finding is each.findings[-1],
            )
    return table


def _verdict(finding: Finding) -> str:
    """A sign whether it is as it must be, and what happened."""
    if finding.must is Must.SHOW:
        return "[yellow]● shown[/]"
    return f"[green]✓ {finding.outcome}[/]" if finding.as_it_must else f"[bold red]✗ {finding.outcome}[/]"
