"""Ctrl-C that never leaves a model half updated."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupts:
    """While entered, the first SIGINT only asks to stop, and `stop_if_asked()` raises KeyboardInterrupt for it.

    A second SIGINT raises at once, but not inside `held()`: there it waits for the end of the block. Where no handler
    can be installed (not the main thread) or SIGINT is ignored (a background job), nothing changes.
    """

    def __init__(self) -> None:
        self._signals = 0
        self._held = False
        self._installed = False
        self._previous: object = None

    def __enter__(self) -> Interrupts:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed and callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False
        if kind is None:  # a signal during the very last step is not lost
            self.stop_if_asked("at the end")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1 and not self._held:
            raise KeyboardInterrupt("at once")

    @property
    def asked(self) -> bool:
        """SIGINT arrived since this was entered."""
        return self._signals > 0

    def stop_if_asked(self, where: str) -> None:
        """Raise KeyboardInterrupt, with `where` as its text, if SIGINT arrived since this was entered."""
        if self._signals:
            raise KeyboardInterrupt(where)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block that no number of SIGINTs can break off."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._signals > 1:
            raise KeyboardInterrupt("at once")
