"""The tables of `darknight fleet`, made from the same records that --json prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from darknight.bench import Transports
from darknight.cli.fleet_visits import Visit
from darknight.fleet.file import FleetFile
from darknight.worker.budget import size_in_words

_ADDRESS = 15  # 127.0.0.1:17101 in one line


def list_table(file: FleetFile) -> RenderableType:
    table = _table(f"{file.path}: {count_of_workers(len(file.workers))}")
    for name in ("", "address", "operator", "certificate"):
        table.add_column(name, overflow="fold")
    for number, entry in enumerate(file.workers):
        table.add_row(
            str(number), *map(escape, (_called(entry.name, entry.address), entry.operator, entry.fingerprint))
        )
    return table


def check_table(visits: Sequence[Visit], plan: dict[str, Any] | None) -> RenderableType:
    table = _table(f"{count_of_workers(len(visits))}, {sum(visit.ok for visit in visits)} well")
    for name in ("", "worker", "operator", "", "version", "device", "memory\nfor you", "round\ntrip"):
        table.add_column(name, overflow="fold", min_width=_ADDRESS if name == "worker" else None)
    for number, visit in enumerate(visits):
        table.add_row(
            str(number),
            escape(_called(visit.name, visit.address)),
            escape(visit.operator),
            "ok" if visit.ok else "[bold red]failed[/]",
            escape(visit.version or "-"),
            escape(visit.device or "-"),
            "-" if visit.memory is None else size_in_words(visit.memory),
            _seconds(visit.seconds),
        )
    return Group(table, *_problems(visits), *([] if plan is None else [Text(_plan_text(plan))]))


def bench_table(visits: Sequence[Visit], nbytes: int, times: int) -> RenderableType:
    table = _table(f"{size_in_words(nbytes)} there and back, best of {times}, without computing")
    for name in ("", "worker", "by", "seconds", "MB/s", "computing"):
        table.add_column(name, overflow="fold")
    for number, visit in enumerate(visits):
        table.add_row(
            str(number),
            escape(_called(visit.name, visit.address)),
            _way(visit),
            _seconds(visit.seconds),
            _rate(nbytes, visit.seconds),
            _seconds(visit.computing_seconds),
        )
    return Group(table, *_problems(visits))


def _way(visit: Visit) -> str:
    if not visit.ok:
        return "-"
    if visit.shared_memory:
        return "shared memory"
    return "sealed pipe" if visit.pipe else "gRPC, TLS"


def transports_table(found: Transports) -> RenderableType:
    table = _table(f"{size_in_words(found.nbytes)} there and back, best of {found.times}, without computing")
    for name in ("", "seconds", "MB/s", "against the least possible"):
        table.add_column(name)
    for label, seconds, ratio in (
        ("plain copy, to fresh memory", found.copy, None),
        ("shared memory, to a worker", found.shared_memory, found.shared_memory_ratio),
        ("raw TLS 1.3 socket", found.tls_socket, None),
        ("sealed pipe, to a worker", found.pipe, found.pipe_ratio),
        ("gRPC with TLS, to a worker", found.grpc_tls, found.grpc_tls_ratio),
    ):
        times = "" if ratio is None else f"{ratio:.2f} times as long"
        table.add_row(label, _seconds(seconds), _rate(found.nbytes, seconds), times)
    return table


def _table(title: str) -> Table:
    return Table(box=box.ROUNDED, title=title, title_style="bold", title_justify="left", padding=(0, 1))


def _problems(visits: Sequence[Visit]) -> list[Text]:
    return [
        Text(f"worker {number} ({visit.name}): {visit.problem}.") for number, visit in enumerate(visits) if not visit.ok
    ]


def _plan_text(plan: dict[str, Any]) -> str:
    held = ", ".join(f"{name} {entry['shares']} of its {entry['workers']}" for name, entry in plan["operators"].items())
    words = (
        f"inputs={plan['inputs']}, colluders={plan['colluders']}, spares={plan['spares']} needs "
        f"{plan['workers_needed']} workers, at most {plan['colluders']} of one operator. "
    )
    if plan["ok"]:
        return f"{words}Shares of a masking by operator: {held}. No operator can unmask the data."
    there = sum(entry["workers"] for entry in plan["operators"].values())
    if there < plan["workers_needed"]:
        return f"{words}Here are {there}. Add workers, or lower inputs or spares."
    return (
        f"{words}Here only {plan['workers_usable']} can be used: with more than colluders={plan['colluders']} shares "
        "of a masking one operator could unmask the data. Add workers of other operators, raise colluders, or lower "
        "inputs."
    )


def _called(name: str, address: str) -> str:
    return address if name == address else f"{name}, {address}"


def count_of_workers(workers: int) -> str:
    return f"{workers} worker{'s'[: workers != 1]}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def _rate(nbytes: int, seconds: float | None) -> str:
    """Both ways count."""
    return "-" if not seconds else f"{2 * nbytes / seconds / 1e6:,.0f}"
