"""Who listens at the doors of workers on this machine: whoever waits for their answers, or else a thread.

A thread that wakes up for an answer, takes it and wakes up whoever waits for it costs several times what taking it
does. So who waits for answers (`attended`) listens himself meanwhile, at all doors; at any other time one thread does.
What comes late, or between two rounds of questions, is heard as it comes; what comes while somebody still asks
(`claimed`), when he waits.

Guarantees: nobody hears a door while another does, so that what a worker says is taken in its order. Who waits is woken
    by an answer, by the end of a link, or by the time that he gave (contract test: tests/wire/test_switchboard.py).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from darknight.types import Answer
from darknight.wire.bell import Bell

_CANCELLED = frozenset({"CANCELLED", "CANCELLED_AND_NOTIFIED"})
_DONE = _CANCELLED | {"FINISHED"}  # as concurrent.futures calls these states

FirstDone = Callable[[Collection[Future[Answer]], float, int], list[Future[Answer]]]


class Awaited(Future[Answer]):
    """An answer that comes over a door of this switchboard. at: when it came, on the monotonic clock; 0 if unknown.

    Whoever waits at the switchboard needs no condition to wait for: it is made for who waits in another way, or wants
    to be called. Until then a change of state is one look and one word, under a lock of all.
    """

    def __init__(self, board: Switchboard) -> None:  # without that of Future, which makes the condition
        self.board = board
        self.at = 0.0
        self._state = "PENDING"
        self._result: Answer | None = None
        self._exception: BaseException | None = None
        self._waiters = []
        self._done_callbacks: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name != "_condition":
            raise AttributeError(name)
        with _CHANGING:
            return self.__dict__.setdefault(name, threading.Condition())

    def done(self) -> bool:
        return self._state in _DONE  # without a lock: a state is looked at, and it does not go back

    def cancelled(self) -> bool:
        return self._state in _CANCELLED

    def result(self, timeout: float | None = None) -> Answer:
        if self._state == "FINISHED" and self._result is not None:
            return self._result
        return super().result(timeout)

    def set_running_or_notify_cancel(self) -> bool:
        with _CHANGING:
            if self._state == "PENDING" and "_condition" not in self.__dict__:
                self._state = "RUNNING"
                return True
        return super().set_running_or_notify_cancel()

    def set_result(self, result: Answer) -> None:
        self.at = self.board.heard_at
        with _CHANGING:
            if self._state == "RUNNING" and "_condition" not in self.__dict__:
                self._result, self._state = result, "FINISHED"  # in this order
                return
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self.at = self.board.heard_at
        super().set_exception(exception)


_CHANGING = threading.RLock()  # of states of answers without a condition; a collection may come while it is held


def _free_again() -> None:
    """In a copy of this process: whoever held it is not there."""
    global _CHANGING
    _CHANGING = threading.RLock()


os.register_at_fork(after_in_child=_free_again)


class Switchboard:
    """The doors of the workers of one machine. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows
        self._ears: dict[int, tuple[Bell, Callable[[], bool]]] = {}  # by descriptor
        self._wires: _Wires | None = None  # while there are doors
        self._owner = 0  # the thread that has claimed, and how often
        self._claims = 0
        self._waived = 0  # claims of the owner, who waits in another way meanwhile
        self._turn = threading.Lock()  # held by who hears
        self._fetched: deque[tuple[int, float]] = deque()  # descriptors: packets that were not heard yet, since when
        self.heard_at = 0.0  # when that came which is being heard

    def listen(self, bell: Bell, hear: Callable[[], bool]) -> None:
        """`hear` is called when there is something to hear, and may find nothing; False ends it, and the bell."""
        with self._lock:
            if self._wires is None:
                self._wires = _Wires()
                name = "darknight-bells"
                threading.Thread(target=self._attend, args=(self._wires,), name=name, daemon=True).start()
            self._ears[bell.fileno()] = bell, hear
            self._wires.doors.register(bell.fileno(), select.EPOLLIN)

    def wake(self) -> None:
        """Somebody who waits here may have nothing to wait for any more."""
        if self._claims:
            with self._lock:
                self._signal()

    # --- who waits for answers --------------------------------------------------------------------------------------
    def claim(self) -> bool:
        """The calling thread listens from now on until `release`, if no other has said so."""
        caller = threading.get_ident()
        with self._lock:
            if self._wires is None or ((self._claims or self._waived) and self._owner != caller):
                return False
            if not self._claims:
                self._wires.still()
            self._owner = caller
            self._claims += 1
            return True

    def release(self) -> None:
        """The thread listens again, if the caller has released as often as claimed."""
        with self._lock:
            self._claims -= 1
            if not self._claims:
                self._leave_to_the_thread()

    @contextmanager
    def waived(self) -> Iterator[None]:
        """While it is open the thread listens, whatever the caller has claimed: he waits for other answers too."""
        with self._lock:
            mine = self._claims if self._owner == threading.get_ident() else 0
            if mine:
                self._claims, self._waived = 0, mine
                self._leave_to_the_thread()
        try:
            yield
        finally:
            if mine:
                with self._lock:
                    self._claims, self._waived = mine, 0
                    assert self._wires is not None
                    self._wires.still()

    def _leave_to_the_thread(self) -> None:
        assert self._wires is not None  # they stay while somebody attends
        self._wires.ring()
        if self._fetched or not self._ears:
            self._signal()  # the thread hears what is left, or ends

    def first_done(self, waiting: Collection[Future[Answer]], timeout: float, several: int) -> list[Future[Answer]]:
        """For who has claimed: those that are done, as soon as so many are; perhaps none, after `timeout` seconds.

        Answers are fetched as they come and heard together: one at a time, each after others have had the processor
        and its caches, they cost more than twice as much.
        """
        wires, deadline = self._wires, time.monotonic() + timeout
        assert wires is not None
        done = [future for future in waiting if future.done()]
        while len(done) < several:
            left = deadline - time.monotonic()
            if left > 0 and len(done) + len(self._fetched) < several:
                if self._fetch(wires, wires.doors.poll(left)):
                    continue
            else:
                self._hear(wires, ())
            done = [future for future in waiting if future.done()]
            if left <= 0:
                break
        return done

    # --- hearing ----------------------------------------------------------------------------------------------------
    def _attend(self, wires: _Wires) -> None:
        while True:
            wires.idle.poll()
            with self._lock:
                if not self._ears and not self._claims and not self._waived:
                    self._wires = None
                    wires.close()
                    return
            self._hear(wires, wires.doors.poll(0))
            self.wake()  # who has claimed meanwhile, and waits for what was heard just now

    def _fetch(self, wires: _Wires, events: list[tuple[int, int]]) -> bool:
        """Takes packets from the doors. False if there was something else: what must be heard now, or a signal."""
        others = []
        with self._turn:
            for event in events:
                ear = self._ears.get(event[0])
                if ear is None:
                    others.append(event)
                    continue
                try:
                    fetched = ear[0].fetch()
                except BaseException:  # Ctrl-C: a packet may be lost, and with it the link
                    ear[0].hang_up()
                    raise
                if fetched:
                    self._fetched.append((event[0], time.monotonic()))
                else:
                    others.append(event)
        if others:
            self._hear(wires, others)
        return not others

    def _hear(self, wires: _Wires, events: Collection[tuple[int, int]]) -> None:
        """What was fetched before, and what there is at these doors now."""
        with self._turn:
            while self._fetched:
                self._hear_one(wires, *self._fetched.popleft())
            for descriptor, _ in events:
                if descriptor == wires.signal:
                    with suppress(BlockingIOError):  # the other was faster
                        os.eventfd_read(wires.signal)
                else:
                    self._hear_one(wires, descriptor, time.monotonic())

    def _hear_one(self, wires: _Wires, descriptor: int, at: float) -> None:
        bell, hear = self._ears.get(descriptor, (None, None))
        if bell is None or hear is None:
            return
        self.heard_at = at
        try:
            if not hear():
                self._leave(wires, descriptor, bell)
        finally:
            self.heard_at = 0.0

    def _leave(self, wires: _Wires, descriptor: int, bell: Bell) -> None:
        with self._lock:
            del self._ears[descriptor]
            # Before it is closed: a copy of this process may have it open still, and epoll would go on with it then.
            wires.doors.unregister(descriptor)
            bell.close()
            if not self._ears:
                self._signal()

    def _signal(self) -> None:
        if self._wires is not None:
            os.eventfd_write(self._wires.signal, 1)


class _Wires:
    """doors: what there is to hear, and the signal. idle: the same, for the thread, unless it is to be still."""

    def __init__(self) -> None:
        self.doors, self.idle = select.epoll(), select.epoll()
        self.signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.doors.register(self.signal, select.EPOLLIN)
        self.idle.register(self.doors.fileno(), select.EPOLLIN)

    def still(self) -> None:
        self.idle.modify(self.doors.fileno(), 0)

    def ring(self) -> None:
        self.idle.modify(self.doors.fileno(), select.EPOLLIN)

    def close(self) -> None:
        self.idle.close()
        self.doors.close()
        os.close(self.signal)


@contextmanager
def claimed(board: Switchboard | None) -> Iterator[None]:
    """While it is open nobody else listens: who asks now will wait at once, and what comes before that can wait too."""
    if board is None or not board.claim():
        yield
        return
    try:
        yield
    finally:
        board.release()


@contextmanager
def attended(asked: Collection[Future[Answer]]) -> Iterator[FirstDone]:
    """While it is open, a function that waits: futures, seconds, how many -> those that are done, as soon as so many
    are, or earlier; none if none was in time.

    Where all answers come over the doors of one switchboard, whoever calls it listens there; else others do.
    """
    boards = {future.board if isinstance(future, Awaited) else None for future in asked}
    board = next(iter(boards)) if len(boards) == 1 else None
    if board is None or not board.claim():
        with ExitStack() as stack:
            for each in boards - {None}:
                assert each is not None
                stack.enter_context(each.waived())
            yield _first_done
        return
    try:
        yield board.first_done
    finally:
        board.release()


def came_at(future: Future[Answer]) -> float:
    """When an answer came, on the monotonic clock: now, if it was not heard over a door."""
    return (future.at if isinstance(future, Awaited) else 0.0) or time.monotonic()


def _first_done(waiting: Collection[Future[Answer]], timeout: float, several: int) -> list[Future[Answer]]:
    return list(wait(waiting, timeout=max(0.0, timeout), return_when=FIRST_COMPLETED).done)
