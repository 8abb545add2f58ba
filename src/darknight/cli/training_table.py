"""The table at the end of `darknight train`, made from the same summary that --json prints."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table


def training_table(summary: dict[str, Any]) -> Table:
    """A table of two columns that fits 80 characters."""
    settings, clear, private = summary["settings"], summary["clear"], summary["private"]
    scheme, time, traffic = settings["scheme"], private["time"], private["traffic"]
    table = Table(
        box=box.ROUNDED,
        show_header=False,
        show_lines=False,
        width=80,
        title=f"{settings['model']} on {settings['data']}: K={scheme['inputs']}, M={scheme['colluders']}, "
        f"{scheme['workers']} workers, {scheme['arithmetic']['name']} arithmetic",
        title_style="bold",
        padding=(0, 1),
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1)

    def row(label: str, text: str, *, section: bool = False) -> None:
        table.add_row(label, escape(text), end_section=section)

    fleet = summary["fleet"]
    if fleet["insecure_one_operator"]:
        table.add_row("PRIVACY: NONE", "[bold red]one operator may hold all shares, and then it can unmask the data[/]")
    row("accuracy, private", _accuracy_words(private, summary["examples"]["test"]))
    row("accuracy, clear", f"{clear['accuracy']:.3f}" if clear else "not trained (--no-clear)", section=True)
    row("leakage", "\n- ".join([private["leakage"]["words"], *private["leakage"]["details"]]))
    if view := summary["view"]:
        words = f"a linear decoder on a worker's input shares: correlation {view['correlation']:z.2f} (1: a copy)"
        row("picture", words)
    row("not covered", "\n".join(f"- {caveat}" for caveat in private["not_covered"]) or "-", section=True)
    row("integrity", integrity_words(private["integrity"]))
    if faults := fault_words(private["faults"]):
        row("faults", faults)
    row("work on shares", _work_words(private["layers"]))
    row("operators", operator_words(fleet), section=True)
    row("wall time", _time_words(time, clear))
    row("  in the enclave", f"{time['enclave_seconds']:.1f} s")
    row("  workers", f"{time['waiting_seconds']:.1f} s waited for, {time['worker_seconds']:.1f} s of work")
    row(
        "bytes",
        f"{size_words(traffic['sent_bytes'])} sent, {size_words(traffic['received_bytes'])} received",
        section=True,
    )
    row("files", "\n".join(summary["files"].values()))
    return table


def _accuracy_words(private: dict[str, Any], examples: int) -> str:
    words = f"{private['accuracy']:.3f} on {examples:,} test examples"
    best = private.get("best")
    if best and best["accuracy"] > private["accuracy"]:
        words += f"; best {best['accuracy']:.3f}, after epoch {best['epoch']}"
    return f"{words}; stopped early" if private.get("stopped_early") else words


def operator_words(fleet: dict[str, Any]) -> str:
    if fleet["file"] is None:
        return f"simulated: all {len(fleet['workers'])} workers are on this machine, in one hand"
    hands = Counter(worker["operator"] for worker in fleet["workers"])
    return ", ".join(f"{operator} ({count} worker{'s'[: count > 1]})" for operator, count in hands.items())


def integrity_words(integrity: dict[str, Any]) -> str:
    words = f"{sum(integrity['passed'].values()):,} checks passed, {integrity['failed']:,} failed"
    if unchecked := sum(integrity["unchecked"].values()):
        words += f", {unchecked:,} results not checked"
    if integrity["overflows"]:
        words += f", {integrity['overflows']:,} repeated at a smaller scale"
    lines = [
        f"{lie['worker']} is out: {lie['finding']} (layer {lie['layer']}, call {lie['call']}, {lie['kind']})"
        for lie in integrity["blamed"]
    ]
    return "\n".join([words, *lines])


def fault_words(faults: dict[str, Any]) -> str:
    """Empty if every worker gave every answer."""
    lines = [
        f"{faults['latest_reasons'].get(worker, worker).rstrip('.')} ({_count(missed, 'answer')} missed)"
        for worker, missed in faults["answers_missed"].items()
    ]
    if own := sum(faults["done_in_enclave"].values()):
        lines.append(f"{_count(own, 'part')} done in the enclave instead")
    return "\n".join(lines)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s'[: number != 1]}"


def _work_words(layers: list[dict[str, Any]]) -> str:
    total = sum(layer["flops"] or 0 for layer in layers)
    masked = sum(layer["flops"] or 0 for layer in layers if layer["where"] == "masked")
    return f"{masked / total:.1%} of the products of forward passes" if total else "none"


def _time_words(time: dict[str, float], clear: dict[str, Any] | None) -> str:
    words = f"{time['total_seconds']:.1f} s"
    return f"{words}, {clear['seconds']:.1f} s in the clear" if clear else words


def size_words(count: int) -> str:
    """1234567 -> 1.2 MB."""
    size, units = float(count), iter(("bytes", "kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while size >= 1000 and (larger := next(units, None)):
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
