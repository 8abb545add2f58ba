"""What happened in a job since the enclave started, for whoever watches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_HEARTBEAT = 5.0  # seconds; a client that is gone is noticed
_MOST = 100_000


class Events:
    """A list that only grows, and can be waited on. Each event has its number in `event`, a kind, and plain values."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self.closed = False
        self._changed = threading.Condition()

    def add(self, kind: str, **words: Any) -> None:
        with self._changed:
            if len(self._events) < _MOST:
                self._events.append({"event": len(self._events) + 1, "kind": kind, **words})
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will happen."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def after(self, number: int, gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """All events with higher numbers, as they come, until the end or until nobody listens."""
        at, spoke = max(0, number), time.monotonic()
        while not gone():
            with self._changed:
                self._changed.wait_for(lambda: len(self._events) > at or self.closed, timeout=0.5)  # noqa: B023
                fresh, closed = self._events[at:], self.closed
            yield from fresh
            at += len(fresh)
            if fresh:
                spoke = time.monotonic()
            elif closed:
                return
            elif time.monotonic() - spoke >= _HEARTBEAT:
                spoke = time.monotonic()
                yield {"event": at, "kind": "alive"}
