"""Workers on this machine, for trying things out: a simulation of separate operators."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from darknight.coding.scheme import Scheme
from darknight.errors import FleetError, UsageError
from darknight.fleet.fleet import Fleet
from darknight.fleet.member import Member
from darknight.fleet.nursery import Berth, Nursery
from darknight.fleet.shared_cores import Bystanders
from darknight.types import Answer, Expected, Record, Task
from darknight.wire import Refused
from darknight.wire.grpc_link import GrpcLink
from darknight.wire.grpc_link import connect as open_link
from darknight.wire.hostile import Plan, require_insecure
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.recording import Recording, recording_pair
from darknight.wire.shared_memory import Host

_RESTART_SECONDS = 10.0  # that a worker has to serve again
_RECORD_SECONDS = 60.0  # that the record of an answer may take longer than the answer


class LocalFleet(Fleet):
    """A fleet whose workers are processes that this one started, and that end with it.

    Guarantees: no worker outlives this process, and none leaves memory behind: not after `close`, nor when the fleet is
        dropped, nor after an exception, Ctrl-C or kill -9 (contract test: tests/fleet/test_local.py).
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        nursery: Nursery,
        host: Host,
        recordings: Sequence[Recording] | None,
        patience: float | None,
    ) -> None:
        self._nursery = nursery
        self._recorded = None if recordings is None else [_Recorded(recording) for recording in recordings]
        stop = partial(_stop, nursery, host, recordings or (), Bystanders())
        super().__init__(members, recordings=recordings, patience=patience, board=host.board, on_close=stop)

    @property
    def processes(self) -> dict[int, int]:
        """The process id of every worker that runs, by number."""
        return {} if self.closed else self._nursery.processes

    def restart(self, worker: int) -> None:
        """Starts another process in the worker's place. It joins a moment later, with an empty memory.

        A worker that was expelled for breaking the protocol stays out.
        """
        self.refuse_closed()
        if not 0 <= worker < self.workers:
            raise FleetError(f"no worker {worker}; this fleet has workers 0 to {self.workers - 1}.")
        self._nursery.restart(worker)
        self._lines[worker].expect()

    def ask(self, worker: int, task: Task, expected: Expected) -> Future[Answer]:
        future = super().ask(worker, task, expected)
        if self._recorded is not None:
            self._recorded[worker].asked(future)
        return future

    def transcript(self, worker: int, *, take: bool = False) -> list[Record]:
        """Every tensor that `worker` received and sent, as it was on the wire; at least up to its latest answer.

        take: and is forgotten here, so that the next transcript goes on from there and the memory does not fill.
        """
        if self._recorded is not None and 0 <= worker < self.workers:
            self._recorded[worker].wait()
        return super().transcript(worker, take=take)


class _Recorded:
    """Knows how many replies a recording must have: the worker records a reply before it sends it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._lock = threading.Lock()
        self._open: list[Future[Answer]] = []
        self._replies = 0

    def asked(self, future: Future[Answer]) -> None:
        with self._lock:
            self._count()
            self._open.append(future)

    def wait(self) -> None:
        with self._lock:
            self._count()
            replies = self._replies
        try:
            self._recording.wait_for(replies, _RECORD_SECONDS)
        except TimeoutError as error:
            raise FleetError(f"the transcript is not complete: {error}") from None

    def _count(self) -> None:
        self._replies += sum(future.done() and _replied(future) for future in self._open)
        self._open = [future for future in self._open if not future.done()]


def _replied(future: Future[Answer]) -> bool:
    return not future.cancelled() and isinstance(future.exception(), Refused | None)


def local_fleet(
    scheme: Scheme,
    *,
    record: bool = False,
    workers: int | None = None,
    patience: float | None = None,
    hostile: Mapping[int, str] | None = None,
) -> LocalFleet:
    """As many worker processes as `scheme` needs. Tensors reach them through shared memory.

    record: keep what each worker received and sent, for `fleet.transcript(j)`. It grows with every call.
    workers: how many, if more than the scheme needs; the others stand by for one that fails.
    patience: seconds a worker may take for a task, instead of a deadline that follows from what was measured.
    hostile: which workers lie, and how: worker number -> plan, such as {1: "noise:passes=grad_weight"}; all plans are
        in darknight.wire.plan. To see what becomes of lies; the environment must say DARKNIGHT_INSECURE_HOSTILE=1.

    Assumes: that you only try things out. All shares are in one hand here, and with all shares nothing is hidden.
    """
    if not isinstance(scheme, Scheme):
        raise FleetError(f"a {type(scheme).__name__} where a scheme belongs. Use dk.Scheme(inputs=4, colluders=1).")
    count = scheme.workers if workers is None else workers
    if isinstance(count, bool) or not isinstance(count, int) or count < scheme.workers:
        raise UsageError(f"workers={workers!r}; this scheme needs {scheme.workers}, and more of them stand by.")
    plans = _plans(hostile or {}, count)
    identity = Identity.create(ENCLAVE)
    doors = [door_name(identity, number) for number in range(count)]
    tapes = [recording_pair() for _ in range(count)] if record else []
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    berths = [
        Berth(
            operator=_operator(number),
            threads=threads,
            shared_memory=door,
            recorder=tapes[number][1] if record else None,
            hostile=plans.get(number),
        )
        for number, door in enumerate(doors)
    ]
    recordings = [Recording(ours) for ours, _ in tapes]
    with ExitStack() as failing:
        for recording in recordings:
            failing.callback(recording.close)
        nursery = Nursery(berths, enclave=identity.certificate)
        failing.callback(nursery.stop)
        nursery.wait()
        host = Host()
        failing.callback(host.close)
        members = [
            Member(f"local {number}", _operator(number), partial(open_local, nursery, number, identity, host, door))
            for number, door in enumerate(doors)
        ]
        tapes_played = recordings if record else None
        fleet = LocalFleet(members, nursery=nursery, host=host, recordings=tapes_played, patience=patience)
        failing.pop_all()  # from here on the fleet ends them
    return fleet


def open_local(
    nursery: Nursery, number: int, identity: Identity, host: Host | None, door: str | None, *, pipe: bool = True
) -> GrpcLink:
    """A link to worker `number`, wherever it is by now. Raises LinkError."""
    report = nursery.report(number, _RESTART_SECONDS)
    return open_link(
        report.address,
        certificate=report.certificate,
        identity=identity,
        host=host,
        shared_memory=door,
        pipe=pipe,
    )


def _plans(hostile: Mapping[int, str], count: int) -> dict[int, str]:
    """The plans, if they make sense: a worker that cannot start would say it less clearly."""
    if hostile:
        require_insecure(os.environ)
    for number, plan in hostile.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise UsageError(f"hostile: no worker {number!r}; this fleet has workers 0 to {count - 1}.")
        if not isinstance(plan, str):
            raise UsageError(f"hostile: a {type(plan).__name__} for worker {number}; needs a plan, such as 'noise'.")
        Plan.parse(plan)
    return dict(hostile)


def door_name(identity: Identity, number: int) -> str:
    """A name for a worker's socket that nobody else on this machine uses or can guess: it follows from a new key."""
    return f"@darknight-{hashlib.sha256(b'door %d of ' % number + identity.key).hexdigest()[:32]}"


def _operator(number: int) -> str:
    return f"simulated-{number}"


def _stop(nursery: Nursery, host: Host, recordings: Sequence[Recording], bystanders: Bystanders) -> None:
    nursery.stop()
    host.close()
    bystanders.leave()
    for recording in recordings:
        recording.close()
