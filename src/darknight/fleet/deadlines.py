"""How long to wait for a worker, from what was measured.

A worker is late when it takes several times what the same task took before, or what the others took just now. Nobody
has to guess how fast a fleet is; who knows better can give a number.
"""

from __future__ import annotations

from collections.abc import Hashable

FIRST = 600.0  # seconds for a task that was never measured, while most workers are still at it
FACTOR = 5.0  # times the usual time is late
LEAST = 1.0  # seconds that are never late: a busy machine needs them for nothing at all


class Deadlines:
    """When the answers to a task are due. `patience` (seconds) replaces every measurement."""

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        self._usual: dict[Hashable, float] = {}

    def due(self, key: Hashable, *, asked: int, answered: int, last: float) -> float:
        """Seconds after the question.

        key: what takes equally long each time. last: seconds until the latest of the `answered` answers.
        """
        if self._patience is not None:
            return self._patience
        most = 2 * answered >= asked and answered > 0
        usual = max(self._usual.get(key, 0.0), last if most else 0.0)
        if not usual:
            return FIRST
        # While most are missing it is rather the machine or the network that is slow, and nobody in particular.
        return max(LEAST, FACTOR * usual) if most else max(60.0, FACTOR * FACTOR * usual)

    def measured(self, key: Hashable, seconds: float) -> None:
        """All answers took `seconds`: the usual time follows slowly down and quickly up."""
        known = self._usual.get(key)
        self._usual[key] = seconds if known is None else max(seconds, 0.9 * known + 0.1 * seconds)
