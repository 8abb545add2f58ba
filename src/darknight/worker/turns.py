"""Turns at the processor, first come first served."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """`with turns:` waits for its turn and holds it until the block ends.

    Guarantees: turns are given in the order in which they were asked for. A session asks for one turn at a time and
    ends it after one task, so whoever asks waits for at most one task of each other session, however many tasks those
    have queued. (A plain lock does not promise that: who releases it may take it again before a waiter wakes up.)
    Contract tests: tests/worker/test_turns.py.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()  # handed over: it stays taken
            else:
                self._taken = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)
