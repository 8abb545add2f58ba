"""How long to wait for a worker, from what was measured.

A worker is late when it takes several times what the others took just now, or what the same task took before. Nobody
has to guess how fast a fleet is; who knows better can give a number.

Guarantees: fewer than half of the workers cannot move a deadline, however they time their answers: it follows from the
    median. No wait is longer than FIRST (contract test: tests/fleet/test_deadlines.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

FIRST = (
    600.0  # seconds for a task that was never measured, while most workers are still at it; the longest of all waits
)
FACTOR = 5.0  # times the usual time is late
LEAST = 1.0  # seconds that are never late: a busy machine needs them for nothing at all
_STALL = 60.0  # seconds, if most are missing: then it is rather the machine or the network that is slow
_MOST_KEYS = 4096


class Deadlines:
    """When the answers to a task are due. `patience` (seconds) replaces every measurement."""

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        self._usual: dict[Hashable, float] = {}

    def due(self, key: Hashable, *, asked: int, times: Sequence[float]) -> float:
        """Seconds after the question.

        key: what takes equally long each time. times: when those answered that have, in seconds after the question.
        """
        if self._patience is not None:
            return self._patience
        usual = self._usual.get(key)
        if 2 * len(times) >= asked and times:
            return min(FIRST, max(LEAST, FACTOR * max(usual or 0.0, _median(times))))
        if usual is None:
            return FIRST
        few = asked < 3  # stand-ins, of whom one may decide
        return min(FIRST, max(LEAST, FACTOR * usual) if few else max(_STALL, FACTOR * FACTOR * usual))

    def late_after(self, key: Hashable) -> float:
        """Seconds after which one worker alone would be late; 0 for a task that was never measured."""
        return self._patience if self._patience is not None else min(FIRST, FACTOR * self._usual.get(key, 0.0))

    def measured(self, key: Hashable, times: Sequence[float]) -> None:
        """All answers have come: the usual time follows slowly down and quickly up. A few alone prove nothing."""
        if len(times) < 3:
            return
        seconds, known = _median(times), self._usual.get(key)
        if len(self._usual) >= _MOST_KEYS and known is None:
            self._usual.pop(next(iter(self._usual)))
        self._usual[key] = seconds if known is None else max(seconds, 0.9 * known + 0.1 * seconds)


def _median(times: Sequence[float]) -> float:
    """The lower one of two."""
    return sorted(times)[(len(times) - 1) // 2]
