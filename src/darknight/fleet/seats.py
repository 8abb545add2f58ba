"""Which worker holds which share: the seats of a scheme, and the standbys.

A scheme with P workers has P seats. Every worker of the fleet beyond them is a standby, and takes the seat of one that
fails. A seat that nobody can take is empty: the enclave does its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from darknight.coding.scheme import Scheme
from darknight.errors import FleetError
from darknight.fleet.fleet import Fleet


@dataclass(frozen=True)
class Change:
    """Seat number `seat` changed hands: to `worker`, or to nobody."""

    seat: int
    worker: int | None
    reason: str


class Seats:
    """Assigns workers so that no operator has more than `colluders` seats.

    Guarantees: a plan that would give one operator more shares of a masking does not construct
        (contract test: tests/fleet/test_seats.py).
    """

    def __init__(self, scheme: Scheme, fleet: Fleet) -> None:
        self._fleet = fleet
        self._cap = scheme.workers if fleet.insecure_one_operator else scheme.colluders
        self._places: list[int | None] = list(self._plan(scheme))

    def worker(self, seat: int) -> int | None:
        """Who sits there; None if nobody does."""
        return self._places[seat]

    def settle(self) -> list[Change]:
        """Empties the seats of workers that are not ready, and fills empty seats with those that are."""
        changes = []
        for seat, worker in enumerate(self._places):
            if worker is not None and not self._fleet.ready(worker):
                self._places[seat] = None
                changes.append(Change(seat, None, self._fleet.trouble(worker)))
        for seat, worker in enumerate(self._places):
            if worker is None and (standby := self._standby()) is not None:
                self._places[seat] = standby
                changes.append(Change(seat, standby, ""))
        return changes

    def _standby(self) -> int | None:
        seated = Counter(self._fleet.operators[worker] for worker in self._places if worker is not None)
        for worker, operator in enumerate(self._fleet.operators):
            if worker not in self._places and seated[operator] < self._cap and self._fleet.ready(worker):
                return worker
        return None

    def _plan(self, scheme: Scheme) -> list[int]:
        chosen = assignment(self._fleet.operators, scheme.workers, self._cap)
        if len(chosen) < scheme.workers:
            raise FleetError(_too_few(scheme, self._fleet))
        return chosen


def assignment(operators: Sequence[str], seats: int, most: int) -> list[int]:
    """Workers for the seats, in order, at most `most` of one operator; fewer than `seats` if there are not enough."""
    seated: Counter[str] = Counter()
    chosen: list[int] = []
    for worker, operator in enumerate(operators):
        if len(chosen) < seats and seated[operator] < most:
            seated[operator] += 1
            chosen.append(worker)
    return chosen


def _too_few(scheme: Scheme, fleet: Fleet) -> str:
    needed = (
        f"{scheme.workers} (inputs={scheme.inputs}, colluders={scheme.colluders}, spares={scheme.spares}, "
        f"for {'training' if scheme.training else 'inference'})"
    )
    if fleet.workers < scheme.workers:
        return f"{fleet.workers} workers; this scheme needs {needed}. Add workers, or lower inputs or spares."
    hands: dict[str, list[str]] = {}
    for operator, name in zip(fleet.operators, fleet.names, strict=True):
        hands.setdefault(operator, []).append(name)
    listed = "; ".join(f"operator {operator!r} runs {', '.join(names)}" for operator, names in sorted(hands.items()))
    usable = sum(min(scheme.colluders, len(names)) for names in hands.values())
    return (
        f"one operator would hold more than {scheme.colluders} of the shares of a masking. It can pool what its "
        f"workers see, and with more than colluders={scheme.colluders} shares the data is not hidden from it. "
        f"{listed}. This scheme needs {needed} workers, at most {scheme.colluders} of one operator; here only {usable} "
        "can be used. Add workers of other operators, raise colluders, or lower inputs. For a trial without any "
        "privacy there is insecure_one_operator=True (of a command: --insecure-one-operator)."
    )
