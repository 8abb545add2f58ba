"""The best of several runs, for the scripts beside this file."""

from __future__ import annotations

import time
from collections.abc import Callable


def best(*runs: Callable[[], object], times: int = 7) -> list[float]:
    """The shortest time of each, in seconds; they take turns, so that a busy moment hits all alike."""
    shortest = [float("inf")] * len(runs)
    for _ in range(times):
        for place, run in enumerate(runs):
            start = time.perf_counter()
            run()
            shortest[place] = min(shortest[place], time.perf_counter() - start)
    return shortest
