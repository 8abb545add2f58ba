"""How long to wait for a worker, from what was measured.

A worker is late when it takes several times what the others took just now, or what the same task took before. Nobody
has to guess how fast a fleet is; who knows better can give a number. Where one or two workers are asked alone, there
are no others: they are measured by themselves.

Guarantees: fewer than half of the workers that are asked cannot move a deadline, however they time their answers: it
    follows from the median. One or two that are asked alone move no deadline but theirs, and that one only down.
    No wait is longer than FIRST (contract test: tests/fleet/test_deadlines.py).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

FIRST = (
    600.0  # seconds for a task that was never measured, while most workers are still at it; the longest of all waits
)
FACTOR = 5.0  # times the usual time is late
LEAST = 1.0  # seconds that are never late: a busy machine needs them for nothing at all
STALL = 60.0  # seconds, if most are missing: then it is rather the machine or the network that is slow
FEW = 3  # workers from which on they judge each other
_MOST_KEYS = 4096


class Deadlines:
    """When the answers to a task are due. `patience` (seconds) replaces every measurement."""

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        self._usual: dict[Hashable, float] = {}
        self._alone: dict[Hashable, float] = {}  # by key and the few that were asked: the best they did

    def due(self, key: Hashable, *, asked: Collection[int], times: Sequence[float]) -> float:
        """Seconds after the question.

        key: what takes equally long each time. asked: which workers. times: when those answered that have, in seconds
        after the question.
        """
        if self._patience is not None:
            return self._patience
        usual, few = self._usual.get(key), len(asked) < FEW
        if 2 * len(times) >= len(asked) and times:
            return min(FIRST, max(LEAST, FACTOR * max(usual or 0.0, _median(times))))
        if usual is not None:
            return min(FIRST, max(LEAST, FACTOR * usual) if few else max(STALL, FACTOR * FACTOR * usual))
        if few:
            best = self._alone.get((key, *sorted(asked)), STALL)
            return min(STALL, FACTOR * max(LEAST, FACTOR * best))  # nobody shows whether the machine is slow
        return FIRST

    def late_after(self, key: Hashable) -> float:
        """Seconds after which one worker alone would be late; 0 for a task that was never measured."""
        return self._patience if self._patience is not None else min(FIRST, FACTOR * self._usual.get(key, 0.0))

    def measured(self, key: Hashable, times: Sequence[float], *, asked: Collection[int]) -> None:
        """No more answers will come. The usual time follows slowly down and quickly up.

        A few alone prove nothing about others. What they needed themselves, at best, is noted if all have answered: it
        is never raised, as they could raise it without end, by answering just in time.
        """
        if len(times) >= FEW:
            seconds, known = _median(times), self._usual.get(key)
            _note(self._usual, key, seconds if known is None else max(seconds, 0.9 * known + 0.1 * seconds))
        elif times and len(times) == len(asked):
            alone = (key, *sorted(asked))
            _note(self._alone, alone, min(max(times), self._alone.get(alone, max(times))))


def _note(measured: dict[Hashable, float], key: Hashable, seconds: float) -> None:
    if len(measured) >= _MOST_KEYS and key not in measured:
        measured.pop(next(iter(measured)))
    measured[key] = seconds


def _median(times: Sequence[float]) -> float:
    """The lower one of two."""
    return sorted(times)[(len(times) - 1) // 2]
