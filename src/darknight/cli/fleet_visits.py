"""A visit to each worker of a fleet file: is it there, who is it, how long does a tensor take there and back?"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from darknight.bench import Echo
from darknight.coding import Scheme
from darknight.errors import DarKnightError
from darknight.fleet.file import FleetFile, WorkerEntry
from darknight.fleet.member import quoted
from darknight.fleet.remote import open_entry
from darknight.fleet.seats import assignment
from darknight.wire import LinkError
from darknight.wire.identity import Identity
from darknight.wire.shared_memory import Host


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What was found. `problem` is empty if all is well; what the worker says of itself is None if it said nothing.

    pipe: whether frames went through a sealed pipe.
    """

    name: str
    address: str
    operator: str
    fingerprint: str
    shared_memory: bool
    pipe: bool = False
    problem: str = ""
    version: str | None = None
    device: str | None = None
    memory: int | None = None
    seconds: float | None = None
    computing_seconds: float | None = None

    @property
    def ok(self) -> bool:
        return not self.problem


def visit_all(file: FleetFile, identity: Identity, *, nbytes: int, times: int, timeout: float) -> list[Visit]:
    """Visits every worker. Small visits go to all at once; larger ones are measurements, and take turns."""
    at_once = len(file.workers) if nbytes < 1 << 16 else 1
    with closing(Host()) as host, ThreadPoolExecutor(max_workers=min(32, at_once)) as pool:
        return list(pool.map(lambda entry: _visit(entry, identity, host, nbytes, times, timeout), file.workers))


def _visit(entry: WorkerEntry, identity: Identity, host: Host, nbytes: int, times: int, timeout: float) -> Visit:
    found: dict[str, Any] = {
        "name": entry.name,
        "address": entry.address,
        "operator": entry.operator,
        "fingerprint": entry.fingerprint,
        "shared_memory": entry.shared_memory is not None,
    }
    try:
        with closing(open_entry(entry, identity, host, timeout=timeout)) as link:
            welcome = link.welcome
            found |= {"version": quoted(welcome.version), "device": quoted(welcome.device), "memory": welcome.memory}
            found |= {"pipe": link.has_pipe}
            trip = Echo(link, nbytes, patience=timeout).best(times)
            return Visit(**found, seconds=trip.seconds, computing_seconds=trip.computing)
    except (LinkError, DarKnightError) as error:
        return Visit(**found, problem=quoted(error))


def plan_words(file: FleetFile, scheme: Scheme) -> dict[str, Any]:
    """How many shares of a masking each operator would hold: never more than `colluders`, or the plan is refused."""
    operators = [entry.operator for entry in file.workers]
    running = Counter(operators)
    held = Counter(operators[worker] for worker in assignment(operators, scheme.workers, scheme.colluders))
    return {
        "ok": held.total() == scheme.workers,
        "inputs": scheme.inputs,
        "colluders": scheme.colluders,
        "spares": scheme.spares,
        "workers_needed": scheme.workers,
        "workers_usable": sum(min(count, scheme.colluders) for count in running.values()),
        "operators": {name: {"workers": count, "shares": held[name]} for name, count in running.items()},
    }
