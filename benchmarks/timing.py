"""The best of several runs, for the scripts beside this file."""

from __future__ import annotations

import time
from collections.abc import Callable


def best(*runs: Callable[[], object], times: int = 7, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The shortest time of each, in seconds; they take turns, so that a busy moment hits all alike.

    clock: time.process_time for what runs in this process alone, so that other programs count less.
    """
    shortest = [float("inf")] * len(runs)
    for _ in range(times):
        for place, run in enumerate(runs):
            start = clock()
            run()
            shortest[place] = min(shortest[place], clock() - start)
    return shortest
