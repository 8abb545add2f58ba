"""The tables of `darknight plan`, made from the same summary that --json prints. They fit 80 characters."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from darknight.cli.training_table import size_words

_LONGEST_LIST = 8  # operators that are named


def plan_tables(summary: dict[str, Any]) -> RenderableType:
    masked = any(layer["where"] == "masked" for layer in summary["layers"])
    kept = [layer for layer in summary["layers"] if layer["where"] == "enclave" and "enclave_flops" in layer]
    tables = [_masked(summary)] if masked else []
    return Group(*tables, *([_kept(kept)] if kept else []), _enclave(summary), _totals(summary))


def _masked(summary: dict[str, Any]) -> Table:
    layers = [layer for layer in summary["layers"] if layer["where"] == "masked"]
    table = _table(f"Masked, in a step ({_count(len(layers), 'layer')}): {layers[0]['why']}")
    table.add_column("layer", overflow="fold")
    for heading in ("shares", "MB\nsent", "MB\nback", "Gflop\nworkers", "Mflop\nenclave", "nats\na call"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer, count in _grouped(layers):
        table.add_row(
            escape(layer["name"]) + (f" [dim]and {count - 1} alike[/]" if count > 1 else ""),
            str(layer["shares"]),
            _number(layer["traffic"]["sent_bytes"] / 1e6),
            _number(layer["traffic"]["received_bytes"] / 1e6),
            _number(layer["worker_flops"] / 1e9),
            _number(layer["enclave_flops"] / 1e6),
            _nats(layer["nats_a_call"]),
        )
    step = summary["step"]
    table.add_section()
    table.add_row(
        "all of them",
        "",
        _number(step["traffic"]["sent_bytes"] / 1e6),
        _number(step["traffic"]["received_bytes"] / 1e6),
        _number(step["worker_flops"] / 1e9),
        _number(sum(layer["enclave_flops"] for layer in layers) / 1e6),
        _nats(step["nats_per_example"]),
    )
    return table


def _kept(layers: list[dict[str, Any]]) -> Table:
    """Products that stay, those of one reason together."""
    table = _table(f"Products in the enclave, in a step ({_count(len(layers), 'layer')})")
    table.add_column("layer", overflow="fold")
    table.add_column("Mflop", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    reasons: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        reasons.setdefault(layer["why"], []).append(layer)
    for why, alike in reasons.items():
        table.add_row(
            escape(alike[0]["name"]) + (f" [dim]and {len(alike) - 1} more[/]" if len(alike) > 1 else ""),
            _number(sum(layer["enclave_flops"] for layer in alike) / 1e6),
            escape(why),
        )
    return table


def _enclave(summary: dict[str, Any]) -> Table:
    reasons = " or ".join(sorted({operation["why"] for operation in summary["operations"]}))
    table = _table(f"In the enclave, in a step: {reasons}")
    table.min_width = len(str(table.title))
    table.add_column("operations", no_wrap=True)
    for heading in ("times", "MB moved", "Mflop"):
        table.add_column(heading, justify="right", no_wrap=True)
    for operation in summary["operations"]:
        table.add_row(
            operation["kind"],
            str(operation["calls"]),
            _number(operation["bytes"] / 1e6),
            _number(operation["flops"] / 1e6),
        )
    return table


def _totals(summary: dict[str, Any]) -> Table:
    work, scheme, run, memory = summary["work"], summary["scheme"], summary["run"], summary["memory"]
    table = Table(box=box.ROUNDED, show_header=False, width=80, padding=(0, 1), title=_title(work), title_style="bold")
    table.title_justify = "left"
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1)

    def row(label: str, text: str, *, section: bool = False) -> None:
        table.add_row(label, escape(text), end_section=section)

    row("scheme", _scheme_words(scheme))
    row("chosen for", _chosen(summary))
    row("spares", _spares(summary["spares"]))
    row("operators", _operators(summary["fleet"], scheme["colluders"]), section=True)
    row("leakage", _leakage(summary))
    row("not covered", "\n".join(f"- {caveat}" for caveat in summary["not_covered"]), section=True)
    sent, back = run["traffic"]["sent_bytes"], run["traffic"]["received_bytes"]
    row("the run", f"{_count(run['steps'], 'step')}, {size_words(sent)} sent, {size_words(back)} received")
    row(
        "memory",
        f"{size_words(memory['worker_bytes'])} of each worker, {size_words(memory['worker_keeps_bytes'])} kept",
    )
    row("", f"{size_words(memory['enclave_at_least_bytes'])} or more of the enclave")
    row("time (estimate)", _time(summary))
    if summary["cost"] is not None:
        row("cost (estimate)", _cost(summary))
    row("estimated from", "; ".join(summary["assumptions"]["words"]), section=True)
    yours = "--data" if work["training"] else "--checkpoint and --data"
    row("to run it", f"{summary['command']} (and your {yours})")
    return table


# --- words ----------------------------------------------------------------------------------------------------------
def _title(work: dict[str, Any]) -> str:
    shape, what = "x".join(map(str, work["shape"])), "training" if work["training"] else "inference"
    often = f", {_count(work['epochs'], 'epoch')}" if work["training"] else ""
    examples = f"{_count(work['examples'], 'example')} of {shape}"
    return f"{what} of {work['model']}, {examples}{often}, batches of {work['batch_size']}"


def _scheme_words(scheme: dict[str, Any]) -> str:
    arithmetic = scheme["arithmetic"]
    noise = f", noise {arithmetic['noise_std']:g} times the largest input" if arithmetic["name"] == "real" else ""
    return (
        f"K={scheme['inputs']} inputs, M={scheme['colluders']} colluders, E={scheme['spares']} spares: "
        f"{_count(scheme['workers'], 'worker')}; {arithmetic['name']} arithmetic{noise}"
    )


def _chosen(summary: dict[str, Any]) -> str:
    words = f"the least {summary['objective']} of {_count(summary['considered'], 'scheme')}"
    if not summary["next_best"]:
        return words
    others = [
        f"K={choice['scheme']['inputs']} E={choice['scheme']['spares']} {choice['scheme']['arithmetic']['name']}, "
        f"{_count(choice['scheme']['workers'], 'worker')}: {_takes(choice)}"
        for choice in summary["next_best"]
    ]
    return f"{words}; next best\n" + "\n".join(others)


def _spares(spares: dict[str, Any]) -> str:
    words = f"{spares['count']}: {spares['reason']}"
    others = [f"with {each['scheme']['spares']}: {_takes(each)}" for each in spares["others"]]
    return "; ".join([words, *others])


def _takes(choice: dict[str, Any]) -> str:
    return _hours(choice["hours"]) + ("" if choice["cost"] is None else f", {_money(choice['cost'])}")


def _operators(fleet: dict[str, Any], colluders: int) -> str:
    hands = fleet["operators"]
    if len(hands) == fleet["workers"]:
        words = f"{_count(fleet['workers'], 'worker')}, each of another operator"
    else:
        named = [f"{name} ({count})" for name, count in list(hands.items())[:_LONGEST_LIST]]
        more = ["..."] if len(hands) > _LONGEST_LIST else []
        words = f"{_count(fleet['workers'], 'worker')}: {', '.join(named + more)}"
    if unusable := fleet["workers"] - fleet["usable"]:
        words += f"; {unusable} of no use, as one operator holds at most {_count(colluders, 'share')} of a masking"
    return words + (f"; {fleet['standbys']} left to stand by" if fleet["standbys"] else "")


def _leakage(summary: dict[str, Any]) -> str:
    words, target = summary["leakage"]["words"], summary["target"]["leakage_nats"]
    return f"{words}" if target is None else f"{words} (target: {target:g})"


def _time(summary: dict[str, Any]) -> str:
    parts, total = summary["run"]["seconds"], summary["run"]["seconds"]["total"]
    split = ", ".join(f"{parts[name] / total:.0%} {words}" for name, words in _PARTS.items() if parts[name])
    alone = _hours(summary["hours_in_the_enclave_alone"])
    faster = summary["hours_in_the_enclave_alone"] < summary["hours"]
    words = ": faster than with workers, at these speeds" if faster else ""
    return f"{_hours(summary['hours'])}: {split}; {alone} in the enclave alone, in the clear{words}"


_PARTS = {"enclave": "enclave", "links": "lines", "workers": "workers", "repeats": "asking again"}


def _cost(summary: dict[str, Any]) -> str:
    prices = summary["assumptions"]["prices"]
    return (
        f"{_money(summary['cost'])}: {_hours(summary['hours'])} at {prices['enclave']:g} for the enclave and "
        f"{prices['worker']:g} for each of {_count(summary['scheme']['workers'], 'worker')} an hour"
    )


def _money(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{hours * 60:.1f} min" if hours >= 1 / 60 else f"{hours * 3600:.1f} s"


# --- layout ---------------------------------------------------------------------------------------------------------
def _table(title: str) -> Table:
    return Table(box=box.ROUNDED, title=title, title_style="bold", title_justify="left", padding=(0, 1))


def _grouped(layers: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Layers that differ in nothing but their name, in one row; ResNet-152 has 156."""
    found: dict[str, tuple[dict[str, Any], int]] = {}
    for layer in layers:
        key = json.dumps({**layer, "name": ""})
        first, count = found.get(key, (layer, 0))
        found[key] = (first, count + 1)
    return list(found.values())


def _number(value: float) -> str:
    """Three digits: 1,234 or 12.3 or 0.0123."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"


def _nats(value: float) -> str:
    return f"{value:.2g}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s'[: number != 1]}"
