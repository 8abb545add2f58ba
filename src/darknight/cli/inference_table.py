"""The table at the end of `darknight infer`, made from the same summary that --json prints."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from darknight.cli.training_table import fault_words, integrity_words, operator_words


def inference_table(summary: dict[str, Any]) -> Table:
    """A table of two columns that fits 80 characters."""
    scheme, accuracy = summary["scheme"], summary["accuracy"]
    table = Table(
        box=box.ROUNDED,
        show_header=False,
        width=80,
        title=f"{summary['model']} on {escape(summary['data'])}: K={scheme['inputs']}, M={scheme['colluders']}, "
        f"{scheme['workers']} workers, {scheme['arithmetic']['name']} arithmetic",
        title_style="bold",
        padding=(0, 1),
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1)

    def row(label: str, text: str, *, section: bool = False) -> None:
        table.add_row(label, escape(text), end_section=section)

    if summary["fleet"]["insecure_one_operator"]:
        table.add_row("PRIVACY: NONE", "[bold red]one operator may hold all shares, and then it can unmask the data[/]")
    row("model", summary["checkpoint"])
    labelled = f"{summary['labelled']:,} of them with a label" if summary["labelled"] else "no labels"
    row("examples", f"{summary['examples']:,}, {labelled}")
    if accuracy:
        row("accuracy", f"{accuracy['top_1']:.3f}; {accuracy['top_5']:.3f} among the first five", section=True)
    row("leakage", summary["leakage"]["words"])
    row("integrity", integrity_words(summary["integrity"]))
    if faults := fault_words(summary["faults"]):
        row("faults", faults)
    row("operators", operator_words(summary["fleet"]), section=True)
    speed = f"{summary['examples_per_second']:,.1f} examples a second"
    row("throughput", f"{speed}; {summary['seconds']:.1f} s, {summary['total_seconds']:.1f} s with the start")
    if summary["file"]:
        row("file", summary["file"])
    return table
