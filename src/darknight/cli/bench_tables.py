"""What `darknight bench` shows at the end: tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from darknight.bench import Ceiling, Change, Contest, Memory, Results, Roofline

_MEBIBYTE = 1 << 20


def tables(found: Results, compared: Sequence[Change] | None, *, layers: bool) -> Iterator[RenderableType]:
    """One after the other; `layers`: with the time of every layer."""
    limits = {id(each): limit for each, limit in found.rooflines()}
    for each in found.ceilings:
        yield _ceiling(each, limits.get(id(each)), layers)
    if any(found.overheads.values()):
        yield _overheads(found)
    if found.memory:
        yield _memory(found.memory)
    if found.passes is not None:
        passes = found.passes
        yield (
            f"encode {passes.encode_over_copy:.2f}, decode {passes.decode_over_copy:.2f} of a copy of the same bytes; "
            f"noise {passes.noise_over_encode:.2f} of the encode"
        )
    if found.rivals is not None:
        yield _rivals([*found.rivals.training.values(), found.rivals.inference])
    if compared is not None:
        yield _history(compared)


def _ceiling(found: Ceiling, limits: Roofline | None, layers: bool) -> RenderableType:
    """Where the enclave's time goes, in parts of its step, of the plain one, and over the least that it could take."""
    kind = "training" if found.training else "inference"
    title = (
        f"{found.model}, {kind}, {found.links}, batch {found.batch} at {found.size}x{found.size}: "
        f"ceiling {found.ratio:.2f}x"
    )
    parts = _new_table(title, "enclave", "of its step", "of the plain step", "/ least")
    notes = [
        f"{len(found.masked)} layers masked (by {found.place}); plain: {found.layout}; best of {found.times}; "
        f"wall time with local workers {found.wall:.1f}x plain"
    ]
    if limits is None:
        for name, seconds in found.phases.items():
            parts.add_row(name, *_shares(found, seconds), "")
    else:
        for name, limit in limits.phases.items():
            over = "" if limit.over is None else f"{limit.over:.1f}"
            parts.add_row(name, *_shares(found, limit.measured), over)
        notes.append(
            f"least: bytes at the speed of memory; at that limit {limits.ceiling:.1f}x, "
            f"and {limits.joined:.1f}x if passes were joined"
        )
    by_layer = _new_table("by layer, without what stays", "layer", "of its step", "of the plain step")
    for layer, spent in found.layers.items():
        by_layer.add_row(layer, *_shares(found, sum(spent.values())))
    return Group(parts, *map(Text, notes), *([by_layer] if layers else []))


def _shares(found: Ceiling, seconds: float) -> tuple[str, str]:
    return f"{seconds / found.enclave:.1%}", f"{seconds / found.plain:.3f}"


def _overheads(found: Results) -> Table:
    table = _new_table(
        "wall time with all workers on this machine, over the plain step", "model", "scheme", "x plain", "x P/K", "CPU"
    )
    for scheme, steps in found.overheads.items():
        for each in steps:
            over = each.wall * each.scheme.inputs / each.scheme.workers
            table.add_row(each.model, scheme, f"{each.wall:.2f}", f"{over:.2f}", f"{each.processors:.2f}")
    table.caption = (
        "P/K: what workers compute over the plain step; CPU: seconds of all processors over the plain step's"
    )
    table.caption_justify = "left"
    return table


def _memory(found: Sequence[Memory]) -> Table:
    title = "peak memory of a training step, MiB beyond the empty process"
    table = _new_table(title, "model", "plain", "enclave", "x", "without shared")
    for each in found:
        sizes = [f"{peak.growth / _MEBIBYTE:,.0f}" for peak in (each.plain, each.protected)]
        ratios = [f"{ratio:.2f}" for ratio in (each.ratio, each.own)]
        table.add_row(f"{each.model}, batch {each.batch} at {each.size}", *sizes, *ratios)
    return table


def _rivals(found: Sequence[Contest]) -> RenderableType:
    table = _new_table("against other ways: wall time of the rival over ours", "network", "rival", "x ours")
    for each in found:
        table.add_row(each.network, each.rival_name, "absent" if each.faster is None else f"{each.faster:.1f}")
    why = next((each.absent for each in found if each.absent), None)
    return Group(table, *([Text(why)] if why else []))


def _history(compared: Sequence[Change]) -> Table:
    table = _new_table("beside earlier runs of this machine", "ratio", "now", "last", "best", "")
    for each in compared:
        past = ["-" if value is None else f"{value:.2f}" for value in (each.last, each.best)]
        mark = f"worse by {each.worse:.0%}" if each.regressed else ""
        table.add_row(each.path, f"{each.now:.2f}", *past, mark)
    return table


def _new_table(title: str, first: str, *others: str) -> Table:
    table = Table(box=box.ROUNDED, title=title, title_style="bold", title_justify="left", padding=(0, 1))
    table.add_column(first, overflow="fold")
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table
