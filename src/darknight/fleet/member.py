"""One worker, as the enclave knows it: a name, an operator, a way to reach it, and what became of that."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.errors import WorkerError
from darknight.types import Answer, Expected, Forget, Task, Weights
from darknight.wire import Link, LinkClosed, LinkError, Misbehaved

_log = logging.getLogger("darknight.fleet")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts to reach a worker again
_PROVEN = 20  # answers after which a worker that came back is dialled as soon as any other
_LEAST_REST, _LONGEST_REST = 0.1, 3600.0  # seconds of rest for a worker that was late
_FAIR = 20.0  # times what a delay cost: the longest rest for it, and how long after that another one counts double


@dataclass(frozen=True)
class Member:
    """Who a worker is, and how to open a link to it; `dial` raises LinkError where it cannot."""

    name: str
    operator: str
    dial: Callable[[], Link]


class Line:
    """The connection with one member, through all its failures.

    `epoch` counts the times that the worker began with an empty memory: what it was sent in another epoch is gone.

        ready      it may be given work
        silent     it missed a deadline: it gets nothing more until every answer that it owes has arrived; then it rests
                   at least as long as the others waited for it, and begins afresh
        broken     the link is gone; it is dialled again from time to time
        expelled   it broke the protocol, or lied, and is not dialled again before it is readmitted

    Guarantees: a worker that is late again and again, however it times that, costs others a twentieth of their time in
        the long run, as long as one wait is less than three minutes (contract test: tests/fleet/test_member.py).
    """

    def __init__(self, number: int, member: Member, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.number = number
        self.member = member
        self.epoch = 0
        self._mourned = 0  # the epoch whose end was reported
        self.expelled = ""
        self._link: Link | None = None
        self._owed = 0  # answers that are late
        self._reason = "it was never reached"
        self._lock = threading.Lock()
        self._dialling = threading.Lock()
        self._over = False
        self._answers = 0  # since the link was opened
        self._pause, self._next_attempt = _FIRST_PAUSE, 0.0
        self._rest, self._fair = 0.0, 0.0  # seconds: of rest, and at most of it for what its delay cost
        self._ready_at, self._forgiven_at = 0.0, 0.0

    # --- what can be asked of it ------------------------------------------------------------------------------------
    @property
    def ready(self) -> bool:
        link = self._link
        there = link is not None and link.failure is None and not self.expelled
        return there and not self._owed and (not self._ready_at or self._clock() >= self._ready_at)

    @property
    def owes(self) -> bool:
        """Answers that were due."""
        return self._owed > 0

    @property
    def broken(self) -> bool:
        """Dialling again could help."""
        link = self._link
        if link is not None and isinstance(link.failure, Misbehaved):  # also between two tasks, when nobody asks
            with self._lock:
                current = self._link is link  # and not readmitted meanwhile
            if current:
                self.expel(f"it broke the protocol: {quoted(link.failure)}")
        return not self.expelled and not self._over and (link is None or link.failure is not None)

    @property
    def trouble(self) -> str:
        """Why it is not ready, in words."""
        if self.expelled:
            return self.expelled
        if self._owed or self._clock() < self._ready_at:
            return "it did not answer in time"
        link = self._link
        return self._reason if link is None else quoted(link.failure) if link.failure is not None else ""

    @property
    def takes_seeds(self) -> bool:
        """Whether it is sent a seed in the place of a share that is noise."""
        link = self._link
        return link is not None and link.takes_seeds

    @property
    def shares_memory(self) -> bool | None:
        """Whether tensors go through memory of this machine; None if it was not reached yet."""
        link = self._link
        return None if link is None else link.shares_memory

    def post(self, message: Weights | Forget) -> None:
        """Sends what has no answer. Raises WorkerError if the worker is not ready, or no longer."""
        try:
            self._ready_link().post(message)
        except LinkError as error:
            raise self.failed(error) from None

    def ask(self, task: Task, expected: Expected) -> Future[Answer]:
        try:
            return self._ready_link().ask(task, expected)
        except LinkError as error:
            raise self.failed(error) from None

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Memory for the share of a task to come; None if there is none: whoever asks it then will hear why."""
        link = self._link
        if link is None or not self.ready:
            return None
        try:
            return link.room(shape, dtype)
        except LinkError:
            return None

    # --- what becomes of it -----------------------------------------------------------------------------------------
    def failed(self, error: LinkError) -> WorkerError:
        """The error in words for people, naming the worker; one that broke the protocol does not come back."""
        if isinstance(error, Misbehaved):
            self.expel(f"it broke the protocol: {quoted(error)}")
            return self.error(self.expelled)
        if self._mourned != self.epoch:
            self._mourned = self.epoch
            _log.warning("worker %d (%s) is gone: %s", self.number, self.member.name, quoted(error))
        return self.error(quoted(error))

    def expel(self, reason: str) -> None:
        """Nothing that comes from this worker is believed any more."""
        if not self.expelled:
            self.expelled = reason
            _log.warning("worker %d (%s) is out: %s", self.number, self.member.name, reason)
        self.close()

    def readmit(self) -> None:
        """Dials an expelled worker again. Raises LinkError where that fails; then it is dialled from time to time."""
        if self.expelled:
            with self._lock:
                old, self._link, self.expelled = (
                    self._link,
                    None,
                    "",
                )  # the old link may know that it broke the protocol
            if old is not None:
                old.close()
            self.expect()
            self.dial(now=True)

    def late(self, owed: Future[Answer], waited: float) -> WorkerError:
        """It missed the deadline of `owed`. When all that it owes has come after all, it begins with an empty memory.

        waited: seconds that this cost. So long it rests then; twice as long as the last time, if it was late not long
        before. A worker that is slow again and again delays nobody for long, and one that was so once is soon back.
        """
        with self._lock:
            link = self._link
            if not self._owed:
                rest = max(_LEAST_REST, waited, 2 * self._rest if self._clock() < self._forgiven_at else 0.0)
                self._fair = min(_LONGEST_REST, max(_LONGEST_PAUSE, _FAIR * waited))
                self._rest = min(rest, self._fair)
                _log.warning("worker %d (%s) did not answer in time", self.number, self.member.name)
            self._owed += 1
            self._begin_rest()  # from now, if its link breaks before it answers

        def answered(_: Future[Answer]) -> None:
            with suppress(LinkError):  # gone again, which the next task will find
                if link is not None and self._owed == 1:
                    link.post(Forget(everything=True))  # before anybody can send it anything else
            with self._lock:
                if self._link is link and self._owed:
                    self._owed -= 1
                    self.epoch += 1
                    if link is not None and link.failure is None:
                        self._begin_rest()

        owed.add_done_callback(answered)
        return self.error("it did not answer in time")

    def _begin_rest(self) -> None:
        self._ready_at = self._clock() + self._rest
        self._forgiven_at = self._ready_at + self._fair

    def expect(self) -> None:
        """Somebody knows that it will be there in a moment: dial again soon, and let it work at once."""
        self._pause, self._next_attempt = _FIRST_PAUSE, 0.0
        self._ready_at = self._forgiven_at = 0.0

    def dial(self, *, now: bool = False) -> None:
        """Opens the link if it is broken and the time has come. Raises LinkError where that fails."""
        if not self._dialling.acquire(blocking=False):
            return
        try:
            if self.broken and (now or self._clock() >= self._next_attempt):
                self._open()
        finally:
            self._dialling.release()

    def dial_in_background(self) -> None:
        """The same, without waiting: a worker that never answers holds up nobody else's dialling."""

        def attempt() -> None:
            with suppress(LinkError):
                self.dial()

        if self.broken and self._clock() >= self._next_attempt and not self._dialling.locked():
            threading.Thread(target=attempt, name="darknight-dial", daemon=True).start()

    def _open(self) -> None:
        # Whatever comes of it, the next attempt is later than this one was: a link that breaks at once is no success.
        self._next_attempt = self._clock() + self._pause
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        try:
            link = self.member.dial()
        except LinkError as error:
            self._reason = quoted(error)
            if isinstance(error, Misbehaved):
                self.expel(f"it broke the protocol: {quoted(error)}")
            raise
        except Exception as error:  # of this machine: no descriptors left, say
            self._reason = f"{type(error).__name__}: {quoted(error)}"
            raise LinkClosed(self._reason) from None
        with self._lock:
            over = self._over or bool(self.expelled)
            old = self._link
            if not over:
                self._link, self._owed, self._answers = link, 0, 0
                self.epoch += 1
        if over:  # while it dialled
            link.close()
        elif old is not None:
            old.close()
            _log.warning("worker %d (%s) is back", self.number, self.member.name)

    def answered(self) -> None:
        """It did what it was asked. After some of that, it does not count any more how often it had to be dialled."""
        self._answers += 1
        if self._answers == _PROVEN:
            self._pause = _FIRST_PAUSE

    def end(self) -> None:
        """The fleet is closed."""
        with self._lock:
            self._over = True
        self.close()

    def close(self) -> None:
        link = self._link
        if link is not None:
            link.close()

    # --- helpers ----------------------------------------------------------------------------------------------------
    def error(self, reason: str, *, refused: bool = False) -> WorkerError:
        words = f"refused: {reason}" if refused else f"failed: {reason}"
        return WorkerError(f"worker {self.number} ({self.member.name}) {words}.", worker=self.number)

    def _ready_link(self) -> Link:
        link = self._link
        if link is None or not self.ready:
            raise self.error(self.trouble or "it is gone")
        return link


def quoted(text: object) -> str:
    """A worker's words, harmless to a terminal and not too long."""
    return "".join(sign if sign.isprintable() else " " for sign in str(text)[:300]).rstrip(".") or "it gave no reason"
