"""The enclave's workers: work goes out, answers come back checked for shape and range, or there is a reason why not.

Guarantees: an answer that leaves this room has exactly the shapes, the dtype and the range that the enclave fixed
    beforehand; a worker that sends anything else is out, and the error names it (contract test:
    tests/fleet/test_fleet.py). The range of an answer that is lent is for its reader to check, who reads it but once.
Assumes: nothing of the workers. Whether an answer is *right* is decided in darknight.integrity.
Leaks: to each worker its own messages, their number, order and timing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from darknight.errors import FleetError, UsageError, WorkerError
from darknight.fleet.deadlines import Deadlines
from darknight.fleet.member import Line, Member, quoted
from darknight.types import Answer, Expected, Forget, Pass, Record, Task, Weights
from darknight.wire import LinkError, Refused
from darknight.wire.switchboard import Switchboard, attended, came_at, claimed

_log = logging.getLogger("darknight.fleet")

_ROUNDS = 0.25  # seconds between looks at who is missing, and what can be forgotten


class Recording(Protocol):
    """What a worker of this machine saw, as it says itself."""

    @property
    def records(self) -> list[Record]: ...

    def take(self) -> list[Record]: ...


class Owner(Protocol):
    """Who works with a fleet."""

    def tidy(self) -> None:
        """Called from time to time by a thread of the fleet: tell workers what they need not keep any more."""


@dataclass(frozen=True)
class Outcome:
    """What came of a round of tasks: answers, and an error for each worker that gave none.

    refused: the workers among them that said no in words, and live on. impossible: those whose answer had values that
    no honest worker can have computed, and for which pass; they are out.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    lost: dict[int, WorkerError] = field(default_factory=dict)
    refused: frozenset[int] = frozenset()
    impossible: dict[int, Pass] = field(default_factory=dict)


class Fleet:
    """Workers by number. Close it, or use it as a context.

    operators: who runs each worker; the guarantee counts operators, because one operator pools what its workers see.
    insecure_one_operator: give all shares to whoever is there. Nothing is hidden then, and every report says so.
    patience: seconds a worker may take for a task, instead of a deadline that follows from what was measured.
    board: where workers of this machine are heard. on_close: ends workers that were started for this fleet; it must not
        refer to the fleet.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        recordings: Sequence[Recording] | None = None,
        insecure_one_operator: bool = False,
        patience: float | None = None,
        board: Switchboard | None = None,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        if patience is not None and not (isinstance(patience, int | float) and 0 < patience < math.inf):
            raise UsageError(f"patience={patience!r}; needs a number of seconds, or None.")
        self.insecure_one_operator = insecure_one_operator
        self._lines = tuple(Line(number, member) for number, member in enumerate(members))
        self._recordings = recordings
        self._deadlines = Deadlines(patience)
        self._board = board
        self._closed = False
        self._runtime: weakref.ref[Owner] | None = None
        self._owner = threading.Lock()
        self._over = threading.Event()
        # A fleet that is closed, or dropped, or still there when the program ends, takes its links and workers along.
        self._end = weakref.finalize(self, _end, self._lines, self._over, on_close)
        try:
            self._dial_all()
        except BaseException:
            self.close()
            raise
        weakref.finalize(self, self._over.set)  # the latest goes first at the end of the program: no dialling any more
        threading.Thread(
            target=_keep_house, args=(weakref.ref(self), self._over), name="darknight-fleet", daemon=True
        ).start()

    # --- who they are -----------------------------------------------------------------------------------------------
    @property
    def workers(self) -> int:
        return len(self._lines)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(line.member.name for line in self._lines)

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(line.member.operator for line in self._lines)

    @property
    def closed(self) -> bool:
        return self._closed

    def ready(self, worker: int) -> bool:
        """Whether it may be given work now."""
        return self._lines[worker].ready

    def trouble(self, worker: int) -> str:
        """Why it is not ready, in words."""
        return self._lines[worker].trouble

    def takes_seeds(self, worker: int) -> bool:
        """Whether it is sent a seed in the place of a share that is noise."""
        return self._lines[worker].takes_seeds

    @property
    def elsewhere(self) -> float:
        """How many of the workers that were reached are on other machines, as a part of 1; all, if nobody was."""
        reached = [line.shares_memory for line in self._lines if line.shares_memory is not None]
        return sum(not shares for shares in reached) / len(reached) if reached else 1.0

    def epoch(self, worker: int) -> int:
        """How often it began with an empty memory: what it was sent in another epoch it does not have any more."""
        return self._lines[worker].epoch

    def __repr__(self) -> str:
        ready = sum(line.ready for line in self._lines)
        missing = "" if ready == self.workers or self._closed else f", {ready} of them ready"
        return f"<Fleet: {self.workers} workers{missing}{', closed' if self._closed else ''}>"

    # --- work -------------------------------------------------------------------------------------------------------
    def post(self, worker: int, message: Weights | Forget) -> None:
        """Sends a message that has no answer. Raises WorkerError if the worker is not ready."""
        self.refuse_closed()
        self._lines[worker].post(message)

    def ask(self, worker: int, task: Task, expected: Expected) -> Future[Answer]:
        """Sends a task; `gather` waits for the answer. Raises WorkerError if the worker is not ready."""
        self.refuse_closed()
        return self._lines[worker].ask(task, expected)

    def room(self, worker: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Memory for the share of a task to come, from which the worker reads it (`wire.Link.room`); None if there is
        none, or the worker is not ready.
        """
        return self._lines[worker].room(shape, dtype)

    def asking(self) -> AbstractContextManager[None]:
        """While it is open, the caller asks and gathers: answers are taken by `gather`, in this thread."""
        return claimed(self._board)

    def gather(
        self,
        asked: Mapping[int, Future[Answer]],
        expected: Mapping[int, Expected],
        key: Hashable = None,
        *,
        within: float | None = None,
    ) -> Outcome:
        """Waits for answers until all are there or the rest is late.

        key: what takes equally long each time. within: seconds, where no measurement is needed.
        """
        begun = time.monotonic()
        times: list[float] = []  # of everybody who said something
        answered: list[float] = []
        waiting = {future: worker for worker, future in asked.items()}
        outcome, refused = Outcome(), set()
        for future, worker in [*waiting.items()]:
            if self._lines[worker].owes and not future.done():  # this one comes after what it owes
                outcome.lost[worker] = self._lines[worker].late(future, 0.0)
                del waiting[future]
        with attended(asked.values()) as first_done:
            while waiting:
                due = self._deadlines.due(key, asked=asked, times=times) if within is None else within
                left = begun + due - time.monotonic()
                # The deadline changes when half of them are there; before and after that, answers are taken together.
                half = (len(asked) + 1) // 2 - len(times)
                done = first_done(waiting, left, half if half > 0 else len(waiting))
                if not done:
                    waited = time.monotonic() - begun
                    for future, worker in waiting.items():
                        outcome.lost[worker] = self._lines[worker].late(future, waited)
                    break
                for future in done:
                    worker = waiting.pop(future)
                    times.append(max(0.0, came_at(future) - begun))
                    try:
                        outcome.answers[worker] = self._checked(worker, future, expected[worker])
                        self._lines[worker].answered()
                        answered.append(times[-1])
                    except Refused as error:
                        outcome.lost[worker] = self._lines[worker].error(quoted(error), refused=True)
                        refused.add(worker)
                    except _Nonsense as error:  # it is out already
                        outcome.lost[worker] = self._lines[worker].error(str(error))
                        outcome.impossible[worker] = error.kind
                    except LinkError as error:
                        outcome.lost[worker] = self._lines[worker].failed(error)
        if 2 * len(answered) >= len(asked) and within is None:
            self._deadlines.measured(key, answered, asked=asked)
        return Outcome(outcome.answers, outcome.lost, frozenset(refused), outcome.impossible)

    def late_after(self, key: Hashable) -> float:
        """Seconds after which one worker alone would be late; 0 for a task that was never measured."""
        return self._deadlines.late_after(key)

    def owes(self, worker: int, future: Future[Answer]) -> None:
        """Another answer that a worker without an answer has not given: it gets nothing more before this one came."""
        if not future.done():
            self._lines[worker].late(future, 0.0)

    def _checked(self, worker: int, future: Future[Answer], expected: Expected) -> Answer:
        """The answer, if its values can be what was asked for. Its form the link has seen to."""
        self.refuse_closed()  # otherwise every worker would seem to have failed
        answer = future.result()
        for kind, tensor in () if expected.lent else answer.tensors.items():
            if complaint := _complaint(tensor, expected):
                self._lines[worker].expel(f"{kind.value}: an answer {complaint}")
                raise _Nonsense(f"{kind.value}: an answer {complaint}", kind)
        return answer

    # --- quarantine -------------------------------------------------------------------------------------------------
    @property
    def quarantined(self) -> dict[int, str]:
        """The workers that are out because of what they did, and what that was. Nothing is sent to them."""
        return {line.number: line.expelled for line in self._lines if line.expelled}

    def expel(self, worker: int, reason: str) -> None:
        """Puts a worker out: it gets nothing more, and nothing that comes from it is believed."""
        self._line(worker).expel(reason or "it was put out")

    def readmit(self, worker: int) -> None:
        """Takes a worker back that was out, when its operator has found out why. It begins with an empty memory."""
        self.refuse_closed()
        line = self._line(worker)
        with suppress(LinkError):  # it is dialled again later
            line.readmit()

    def _line(self, worker: int) -> Line:
        if not 0 <= worker < self.workers:
            raise FleetError(f"no worker {worker}; this fleet has workers 0 to {self.workers - 1}.")
        return self._lines[worker]

    # --- whose they are ---------------------------------------------------------------------------------------------
    def attach(self, runtime: Owner) -> None:
        """`runtime` works with this fleet from now on, alone: workers know calls and layers by its names for them."""
        with self._owner:
            current = self._runtime() if self._runtime is not None else None
            if current is not None and current is not runtime:
                raise FleetError("this fleet works for another runtime. Close that one first, or start another fleet.")
            self.refuse_closed()
            self._forget_everything()  # of a runtime that was dropped without being closed
            self._runtime = weakref.ref(runtime)

    def detach(self, runtime: Owner) -> None:
        """`runtime` is done: workers forget everything that it sent them. Nothing happens if it is not attached."""
        with self._owner:
            if self._runtime is not None and self._runtime() is runtime:
                if not self._closed:
                    self._forget_everything()
                self._runtime = None

    def _forget_everything(self) -> None:
        for line in self._lines:
            with suppress(WorkerError):  # one that is gone remembers nothing
                line.post(Forget(everything=True))

    def transcript(self, worker: int, *, take: bool = False) -> list[Record]:
        """Every tensor that `worker` received and sent so far, as it was on the wire.

        take: and is forgotten here, so that the next transcript goes on from there and the memory does not fill.
        """
        if self._recordings is None:
            raise FleetError("this fleet keeps no transcripts. Start it with local_fleet(scheme, record=True).")
        if not 0 <= worker < self.workers:
            raise FleetError(f"no worker {worker}; this fleet has workers 0 to {self.workers - 1}.")
        recording = self._recordings[worker]
        return recording.take() if take else recording.records

    # --- beginning and end ------------------------------------------------------------------------------------------
    def _dial_all(self) -> None:
        """Reaches every worker at once; those that do not answer may come later, if at least one is there."""

        def attempt(line: Line) -> None:
            with suppress(LinkError):
                line.dial(now=True)

        with ThreadPoolExecutor(max_workers=max(1, min(32, len(self._lines)))) as pool:
            list(pool.map(attempt, self._lines))
        if not any(line.ready for line in self._lines):
            reasons = "; ".join(f"{line.member.name}: {line.trouble}" for line in self._lines)
            raise FleetError(f"no worker can be used. {reasons or 'The fleet is empty'}.")

    def close(self) -> None:
        """Ends the links, and the workers if they were started for this fleet. Transcripts stay."""
        if not self._closed:
            self._closed = True
            self._end()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def refuse_closed(self) -> None:
        """Raises FleetError if the fleet is closed."""
        if self._closed:
            raise FleetError("the fleet is closed. Use the model inside the fleet's context, or unprotect it.")


class _Nonsense(LinkError):  # noqa: N818
    """Values that no honest worker can have computed. The worker is expelled already."""

    def __init__(self, message: str, kind: Pass) -> None:
        super().__init__(message)
        self.kind = kind


def _end(lines: Sequence[Line], over: threading.Event, on_close: Callable[[], object] | None) -> None:
    over.set()
    for line in lines:
        line.end()
    if on_close is not None:
        on_close()


def _keep_house(fleet: weakref.ref[Fleet], over: threading.Event) -> None:
    """Dials workers that are gone, and lets the owner tidy up, until the fleet is closed or dropped."""
    trouble = ""
    while not over.wait(_ROUNDS):
        try:
            if not _one_round(fleet):
                return
        except Exception as error:  # no thread to be had, say: the next round may do better, and must come
            if trouble != (trouble := type(error).__name__):
                _log.warning("a fleet's housekeeping failed with %s; it is tried again", trouble)


def _one_round(fleet: weakref.ref[Fleet]) -> bool:
    """Whether there is still a fleet to look after."""
    current = fleet()
    if current is None:
        return False
    try:
        for line in current._lines:
            line.dial_in_background()
    finally:
        runtime = current._runtime
        owner = runtime() if runtime is not None else None
        if owner is not None:
            owner.tidy()
    return True


def _complaint(tensor: Tensor, expected: Expected) -> str:
    if not tensor.numel():
        return ""
    least, most = torch.aminmax(tensor)  # one pass; NaN if there is one
    if expected.prime is None:
        return "" if bool(least.isfinite() & most.isfinite()) else "with values that are not finite"
    return "" if int(least) >= 0 and int(most) < expected.prime else "with values outside the field"
