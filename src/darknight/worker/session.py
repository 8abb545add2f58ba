"""One enclave at a worker, and the places that a worker has for enclaves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from darknight.errors import FleetError, UsageError
from darknight.types import Answer, BackwardTask, Forget, ForwardTask, Message, Refusal, TooLarge
from darknight.wire import Seat
from darknight.wire.grpc_seat import Peer
from darknight.wire.hostile import HostileSeat, Plan
from darknight.worker.budget import Budget
from darknight.worker.engine import Engine
from darknight.worker.executor import Executor
from darknight.worker.machine import Ceiling
from darknight.worker.metrics import Metrics
from darknight.worker.serve import serve
from darknight.worker.turns import Turns

_log = logging.getLogger("darknight.worker")

_MOST_LINES = 20  # of refusals in the log of one session; its end says how many there were
_QUIET = 10.0  # seconds between two lines about sessions that were refused to one certificate


class Sessions:
    """The places of a worker. Each has the same part of the memory limit, and the same right to a turn.

    Guarantees: what one enclave sends, keeps or asks for changes nothing for another but the time of at most one task
    a turn. Weights and shares are found by their own session only; the memory of a place is promised to it alone, so
    filling one refuses nothing in another. One certificate cannot take the places of the others. Contract tests:
    tests/worker/test_session.py.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        limit: int,
        places: int,
        certificates: int,
        metrics: Metrics,
        patience: float,
        recording: Callable[[Seat], Seat] | None = None,
        hostile: Plan | None = None,
    ) -> None:
        self._engine = engine
        self._share = limit // places
        self._places = places
        self._per_certificate = max(1, places // max(1, certificates))
        self._metrics = metrics
        self._patience = patience
        self._recording = recording
        self._hostile = hostile
        self._turns = Turns()
        self._ceiling = Ceiling(limit)
        self._changed = threading.Condition()
        self._open: list[WorkerSession] = []
        self._waiting: set[str] = set()
        self._complained: dict[str, tuple[float, int]] = {}  # certificate -> last line about it, refusals since
        metrics.limit.set(limit)
        metrics.held.set_function(lambda: sum(session.budget.held for session in list(self._open)))
        metrics.sessions.set_function(lambda: len(self._open))

    def open(self, peer: Peer) -> WorkerSession:
        """A place for this enclave; raises FleetError, in words for its owner, when there is none."""
        with self._changed:
            if peer.fingerprint not in self._waiting:  # one at a time: who waits holds up a thread of the server
                self._waiting.add(peer.fingerprint)
                self._changed.wait_for(lambda: not self._obstacle(peer), timeout=self._patience)
                self._waiting.remove(peer.fingerprint)
            if obstacle := self._obstacle(peer):
                self._metrics.turned_away.inc()
                self._complain(peer, obstacle)
                raise FleetError(obstacle)
            session = WorkerSession(
                peer,
                budget := Budget(self._share, self._ceiling.make_room),
                Executor(self._turns, engine=self._engine, budget=budget),
                self._metrics,
                recording=self._recording,
                hostile=self._hostile,
                on_close=self._close,
            )
            self._open.append(session)
        fields = {"peer": peer.fingerprint, "address": peer.address, "sessions": self.count}
        _log.info("session opened", extra={"fields": fields})
        return session

    @property
    def count(self) -> int:
        return len(self._open)

    def _obstacle(self, peer: Peer) -> str:
        own = sum(session.peer.fingerprint == peer.fingerprint for session in self._open)
        if own >= self._per_certificate:
            return (
                f"this worker already serves {own} of this enclave's connections, which is what it grants one "
                "certificate. Close one, or ask its operator for a larger --enclaves."
            )
        if len(self._open) >= self._places:
            return f"this worker already serves {len(self._open)} enclaves. Ask its operator for a larger --enclaves."
        return ""

    def _complain(self, peer: Peer, reason: str) -> None:
        """In the log; who tries again a thousand times gets a line now and then, which says how many there were."""
        now = time.monotonic()
        last, unsaid = self._complained.get(peer.fingerprint, (-_QUIET, 0))
        if now - last < _QUIET:
            self._complained[peer.fingerprint] = last, unsaid + 1
            return
        self._complained[peer.fingerprint] = now, 0
        fields = {"peer": peer.fingerprint, "address": peer.address, "reason": reason, "more_before": unsaid}
        _log.warning("session refused", extra={"fields": fields})

    def _close(self, session: WorkerSession) -> bool:
        with self._changed:
            if session not in self._open:
                return False
            self._open.remove(session)
            self._changed.notify_all()
            idle = not self._open
        if idle:
            self._ceiling.give_back()
        return True


class WorkerSession:
    """One enclave's connection: what it keeps here, and its loop. Made by `Sessions.open`."""

    def __init__(
        self,
        peer: Peer,
        budget: Budget,
        executor: Executor,
        metrics: Metrics,
        *,
        recording: Callable[[Seat], Seat] | None,
        hostile: Plan | None,
        on_close: Callable[[WorkerSession], bool],
    ) -> None:
        self.peer = peer
        self.budget = budget
        self._executor = executor
        self._metrics = metrics
        self._recording = recording
        self._hostile = hostile
        self._on_close = on_close
        self._begun = time.monotonic()
        self._tasks = 0
        self._refused = 0

    def admit(self, nbytes: int) -> None:
        """Called by the reader before it makes room for a tensor; raises OpError when there is no room."""
        self.budget.admit(nbytes)

    def serve(self, seat: Seat) -> None:
        """Serves until the link ends; everything that was kept goes with it."""
        try:
            serve(self._seated(seat), self._executor, self._observe)
        finally:
            self._executor.forget_everything()
            self.budget.release_all()

    def _seated(self, seat: Seat) -> Seat:
        """The seat with what is around it. A recording is next to the wire: it has what was really sent."""
        recorded = self._recording(seat) if self._recording else seat
        if self._hostile is None:
            return recorded
        try:
            return HostileSeat(recorded, self._hostile)
        except UsageError as error:  # its file was changed to what is no plan
            _log.error("no session", extra={"fields": {"peer": self.peer.fingerprint, "reason": str(error)}})
            raise

    def close(self) -> None:
        """Gives the place back. A second time does nothing."""
        if not self._on_close(self):
            return
        fields = {
            "peer": self.peer.fingerprint,
            "address": self.peer.address,
            "seconds": round(time.monotonic() - self._begun, 3),
            "tasks": self._tasks,
            "refused": self._refused,
        }
        _log.info("session closed", extra={"fields": fields})

    def _observe(self, message: Message | TooLarge, reply: Answer | Refusal | None) -> None:
        if isinstance(message, Forget):
            if _log.isEnabledFor(logging.DEBUG):
                fields = {"peer": self.peer.fingerprint, "calls": len(message.calls), "weights": len(message.weights)}
                _log.debug("evicted", extra={"fields": {**fields, "everything": message.everything}})
        elif not isinstance(message, TooLarge):
            self._metrics.received.inc(0 if message.tensor.is_meta else message.tensor.nbytes)  # a seed is no tensor
        if isinstance(reply, Refusal):
            self._refused += 1
            fields = {"peer": self.peer.fingerprint, "message": type(message).__name__, "reason": reply.message}
            # An enclave that is refused a thousand times has one problem, and the operator needs no thousand lines.
            level = logging.WARNING if self._refused <= _MOST_LINES else logging.DEBUG
            _log.log(level, "refused", extra={"fields": fields})
        elif reply is not None:
            self._metrics.seconds.observe(reply.seconds)
            self._metrics.sent.inc(sum(tensor.nbytes for tensor in reply.tensors.values()))
        for kind in _passes(message):
            self._tasks += 1
            self._metrics.outcomes[kind, "refused" if isinstance(reply, Refusal) else "done"].inc()


def _passes(message: Message | TooLarge) -> list[str]:
    """The label of a task: its passes; "keep" for one that only brings a share."""
    match message:
        case ForwardTask():
            return ["forward" if message.compute else "keep"]
        case BackwardTask():
            return [kind.value for kind in message.passes]
        case TooLarge():
            return ["too_large"]
    return []
