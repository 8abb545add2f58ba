"""What happened in a job since the enclave started, for whoever watches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_HEARTBEAT = 5.0  # seconds; a client that is gone is noticed
_MOST = 100_000


class Events:
    """A list that can be waited on. Each event has its number in `event`, a kind, and plain values.

    The newest are kept: receipts among them are what a client must not miss, and the newest receipt is the one that
    counts (contract test: tests/service/test_events.py).
    """

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._forgotten = 0
        self.closed = False
        self._changed = threading.Condition()

    def add(self, kind: str, **words: Any) -> None:
        with self._changed:
            if len(self._events) == _MOST:
                del self._events[: _MOST // 10]
                self._forgotten += _MOST // 10
            self._events.append({"event": self._forgotten + len(self._events) + 1, "kind": kind, **words})
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will happen."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def after(self, number: int, gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """All that are kept with higher numbers, as they come, until the end or until nobody listens."""
        at, spoke = max(0, number), time.monotonic()
        while not gone():
            with self._changed:
                self._changed.wait_for(lambda: self._newest > at or self.closed, timeout=0.5)  # noqa: B023
                fresh, closed = self._events[max(0, at - self._forgotten) :], self.closed
                at = max(at, self._newest)
            yield from fresh
            if fresh:
                spoke = time.monotonic()
            elif closed:
                return
            elif time.monotonic() - spoke >= _HEARTBEAT:
                spoke = time.monotonic()
                yield {"event": at, "kind": "alive"}

    @property
    def _newest(self) -> int:
        return self._forgotten + len(self._events)
