"""Several threads for one pass of a library: parts of an operand that do not depend on each other, each on a core.

ctypes lets other threads run while a function of a library does, so Python's own threads are enough. torch's setting
says how many (torch.set_num_threads, OMP_NUM_THREADS); with one, and for small operands, a pass is one call, as ever.

Guarantees: results do not depend on the number of threads, bit for bit: what is summed in floating point is summed in
    one part, and sums of parts are of integers. No part is running any more when `split` returns or raises, and what a
    part raised is raised. (Contract tests: tests/kernels/test_threads.py, tests/kernels/test_threaded.py)
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

_EACH = 1 << 18  # numbers that are worth a thread: with half of them, a pass gains nothing (benchmarks/threads.py)

Result = TypeVar("Result")
Structure = TypeVar("Structure", bound=ctypes.Structure)


def split(does: Callable[[int, int], Result], length: int, numbers: int, step: int = 1) -> list[Result]:
    """does(first, last) of parts of [0, length), in order: as many as a pass over so many numbers is worth.

    The parts are about equal, and begin at multiples of `step`. They may run at the same time, in any order. What they
    do besides is done by NumPy, which has no threads.
    """
    if numbers < 2 * _EACH:
        return [does(0, length)]
    steps = -(-length // step)
    count = min(torch.get_num_threads(), numbers // _EACH, steps)
    if count < 2:
        return [does(0, length)]
    starts = [steps * part // count * step for part in range(count)]
    call = _Call(does, list(zip(starts, [*starts[1:], length], strict=True)))
    _pool.offer(call, count - 1)
    return call.finished()


def one_is_enough(numbers: int) -> bool:
    """Whether a pass over so many numbers is not worth a second thread, or there is none."""
    return numbers < 2 * _EACH or torch.get_num_threads() < 2


def part(what: Structure, whole: bool, **changed: Any) -> Structure:
    """What is handed to a library, with other numbers and places: a copy, unless it is all of it.

    A copy keeps nothing alive that it points to: `what` has to stay meanwhile.
    """
    mine = what if whole else type(what).from_buffer_copy(what)
    for name, value in changed.items():
        setattr(mine, name, value)
    return mine


def zeros(*shape: int, dtype: type[np.generic]) -> Tensor:
    """Made by this thread: for a large one torch would wake threads of its own, in every thread of ours."""
    return torch.from_numpy(np.zeros(shape, dtype))


def moved(place: int | None, offset: int) -> int | None:
    """A place in memory, so many bytes further; none stays none."""
    return None if place is None else place + offset


class _Call(Generic[Result]):
    """The parts of one pass. Whoever is free takes the next: the caller too, who never waits for a thread to wake.

    Where there are no threads (in a fork, or when a process ends) the caller simply does them all.
    """

    def __init__(self, does: Callable[[int, int], Result], ranges: list[tuple[int, int]]) -> None:
        self._does, self._ranges = does, ranges
        self._open = deque(range(len(ranges)))
        self._results: dict[int, Result] = {}
        self._failures: list[BaseException] = []
        self._came: list[None] = []  # helpers, before they take a part;
        self._left: list[None] = []  # and when they take no more
        self._news: SimpleQueue[None] = SimpleQueue()

    def help(self) -> None:
        """In a thread of the pool."""
        self._came.append(None)
        self._take_parts()
        self._left.append(None)
        self._news.put(None)

    def finished(self) -> list[Result]:
        """In the thread of the caller: the results, once nobody works on them any more."""
        try:
            self._take_parts()
        finally:
            while True:
                try:
                    self._open.clear()
                    while len(self._left) < len(self._came):
                        self._news.get()
                    break
                except BaseException as failure:  # a signal's: helpers still write to memory that is not to be freed
                    self._failures.append(failure)
        if self._failures:
            raise self._failures[0]
        return [self._results[place] for place in range(len(self._ranges))]

    def _take_parts(self) -> None:
        while self._open:
            try:
                place = self._open.popleft()
            except IndexError:  # somebody was faster
                return
            try:
                self._results[place] = self._does(*self._ranges[place])
            except BaseException as failure:
                self._failures.append(failure)
                self._open.clear()


class _Pool:
    """Threads that wait for calls, as many as anybody ever asked for. They sleep meanwhile."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._ended = False

    def offer(self, call: _Call[Any], helpers: int) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                while len(self._threads) < helpers:
                    thread = threading.Thread(target=_serve, args=(self._calls,), name="darknight-kernels", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            except RuntimeError:  # the machine, or an enclave of a fixed size, has no more of them: fewer will do
                pass
            for _ in range(min(helpers, len(self._threads))):
                self._calls.put(call)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads:
            thread.join()


def _serve(calls: SimpleQueue[_Call[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.help()
        del call  # it holds operands, and the next one may be long in coming


_pool = _Pool()


def _start_again() -> None:
    """A fork has none of the threads, and who held a lock is not there to release it."""
    global _pool
    _pool = _Pool()


@atexit.register
def _end() -> None:
    _pool.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)
