"""Seconds of processors, which a busy machine disturbs less than the clock on the wall."""

from __future__ import annotations

import time
from collections.abc import Iterable


def processor_seconds(workers: Iterable[int] = ()) -> float:
    """Of this process and others. Linux has a clock for every process, whose number is made of the process id."""
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in workers)
