"""The workers as a layer call sees them: by seat of the scheme, with the weights they need, until they fail.

Guarantees: no share leaves for a worker that may not have it (`fleet.Custody`); a worker that fails costs its answer
    and nothing else (contract tests: tests/runtime/test_faults.py).
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from darknight.accounting import Blamed, Ledger, Missed, Reseated, Traffic
from darknight.coding import Scheme
from darknight.errors import FleetError, WorkerError
from darknight.fleet import Custody, Fleet, Seats
from darknight.runtime.layer import Layer, SentWeights
from darknight.runtime.phases import phase
from darknight.types import Answer, Expected, Forget, ForwardTask, Pass, Task, Weights

T = TypeVar("T")

_NO_NOTES: Mapping[int, tuple[str, int, int, Pass]] = MappingProxyType({})

_BROKE = "it broke the protocol"  # so begins the reason for which the fleet put such a worker out
_OUTSIDE = "values outside the field"
_AT_ONCE = 5.0  # seconds for what a worker must have done already, or need not think about
WORTH = 8 << 20  # bytes of what is over, at each worker, that are worth a message to everybody during a step
MANY = 64  # calls and weights that are so too


@dataclass(eq=False, kw_only=True, slots=True)
class Order:
    """A task for one worker, and what its answer must look like.

    holder: the worker and its epoch when the order was made. first: a share that it must keep before the task.
    """

    holder: tuple[int, int]
    task: Task
    expected: Expected
    first: ForwardTask | None = None
    worker: int = field(init=False)

    def __post_init__(self) -> None:
        self.worker = self.holder[0]


@dataclass(eq=False, kw_only=True, slots=True)
class Asked:
    """Orders that are with their workers. answers: by worker, to its task; first: to the share that went before it.

    lost: workers that could not be reached. since: when they were asked, on the clock of performance. notes: by worker,
    what it was asked: layer, seat, call, pass.
    """

    orders: Mapping[int, Order]
    notes: Mapping[int, tuple[str, int, int, Pass]]
    answers: dict[int, Future[Answer]]
    first: dict[int, Future[Answer]]
    lost: dict[int, WorkerError]
    since: float

    def abandon(self) -> None:
        """Nobody will wait for these answers: they are dropped when they come. Workers are none the worse for it."""
        for future in (*self.first.values(), *self.answers.values()):
            future.cancel()


@dataclass(eq=False, slots=True)
class Round:
    """Answers by seat, and who gave them; why workers gave none; `refused` said so in words, and live on.

    impossible: the workers whose answer had values that no honest one can have, and for which pass; they are out.
    lent: by seat, the answers that are still where their workers can write, and how to release them.
    """

    answers: dict[int, Mapping[Pass, Tensor]]
    by: dict[int, int]
    lost: dict[int, WorkerError]
    refused: frozenset[int]
    impossible: dict[int, Pass]
    lent: dict[int, Callable[[], None]]


class Crew:
    """Everything about workers that outlives one call."""

    def __init__(self, scheme: Scheme, fleet: Fleet, ledger: Ledger, prime: int | None) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._prime = prime
        self._nothing = Expected({}, torch.int32, prime)  # of an answer without tensors
        self.seats = Seats(scheme, fleet)
        self.custody = Custody(fleet.operators, scheme.colluders, one_operator=fleet.insecure_one_operator)
        self._epochs: dict[int, int] = {}  # by worker: the epoch in which it was last given weights
        self._asked: dict[int, tuple[str, int, int, Pass]] = {}  # by worker, of its last task: layer, seat, call, pass
        self._convicted: set[int] = set()  # of breaking the protocol: the ledger has heard of them
        self._warned = False  # of refusals
        self._forgotten: deque[tuple[int, int]] = deque()  # calls, and bytes of a share
        self._outdated: deque[tuple[tuple[str, int], int]] = deque()  # layer and version, and bytes of the weights
        self.waiting_seconds = 0.0
        self.worker_seconds = 0.0

    # --- seats ------------------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Standbys take the seats of workers that failed; the ledger hears of it."""
        self._fleet.refuse_closed()
        self._blame_for_form()
        for change in self.seats.settle():
            name = None if change.worker is None else self._fleet.names[change.worker]
            self._ledger.record(Reseated(seat=change.seat, worker=name, reason=change.reason))

    def name(self, worker: int) -> str:
        return self._fleet.names[worker]

    def now(self, worker: int) -> tuple[int, int]:
        """The worker and its epoch: two of these differ if the worker lost its memory in between."""
        return worker, self._fleet.epoch(worker)

    def still(self, holder: tuple[int, int] | None) -> int | None:
        """The worker, if it is ready and still has what it was given then."""
        if holder is None or not self._fleet.ready(holder[0]) or self._fleet.epoch(holder[0]) != holder[1]:
            return None
        return holder[0]

    def room(self, worker: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Memory from which the worker reads a share; None if there is none."""
        return self._fleet.room(worker, shape, dtype)

    # --- work -------------------------------------------------------------------------------------------------------
    def asking(self) -> AbstractContextManager[None]:
        """While it is open, answers are taken by who waits for them, in this thread."""
        return self._fleet.asking()

    def run(self, layer: Layer, weights: SentWeights, orders: Mapping[int, Order], key: Hashable) -> Round:
        """Gives every order to its worker, and waits."""
        with self.asking():
            return self.wait(layer, self.ask(layer, weights, orders), key)

    def ask(self, layer: Layer, weights: SentWeights, orders: Mapping[int, Order]) -> Asked:
        """Gives every order to its worker, and waits for none."""
        label = layer.label
        notes = {
            order.worker: (label, seat, order.task.call, next(iter(order.expected.shapes), Pass.FORWARD))
            for seat, order in orders.items()
        }
        self._asked.update(notes)
        return self._sent(weights, orders, notes)

    def wait(self, layer: Layer, asked: Asked, key: Hashable, meanwhile: Callable[[], None] = lambda: None) -> Round:
        """Does `meanwhile`, and waits. The ledger hears of every answer missing."""
        meanwhile()
        found = self._gathered(asked, key)
        for worker, reason in found.lost.items():
            self._ledger.record(Missed(layer=layer.label, worker=self.name(worker), reason=str(reason)))
        self._asked.update(asked.notes)  # again: by now it may have been asked something else
        for worker, kind in found.impossible.items():
            finding = _OUTSIDE if self._prime is not None else "values that are not finite"
            self._blame(worker, (*asked.notes[worker][:3], kind), "range", finding)
        self._blame_for_form()
        return found

    def _sent(
        self,
        weights: SentWeights,
        orders: Mapping[int, Order],
        notes: Mapping[int, tuple[str, int, int, Pass]] = _NO_NOTES,
    ) -> Asked:
        begun, fleet, sent = time.perf_counter(), self._fleet, 0
        asked: dict[int, Future[Answer]] = {}
        first: dict[int, Future[Answer]] = {}
        with phase("send weights"):
            lost = self._given(weights, [order.worker for order in orders.values()])
        with phase("send"):
            for order in orders.values():
                worker, task = order.worker, order.task
                if worker in lost:
                    continue
                try:
                    if order.first is not None:
                        first[worker] = fleet.ask(worker, order.first, self._nothing)
                        sent += order.first.tensor.nbytes
                    asked[worker] = fleet.ask(worker, task, order.expected)
                    if task.seed is None or not fleet.takes_seeds(worker):  # a seed is in the header
                        sent += task.tensor.nbytes
                except WorkerError as error:
                    lost[worker] = error
        self._ledger.record(Traffic(sent=sent, received=0))
        self.waiting_seconds += time.perf_counter() - begun
        return Asked(orders=orders, notes=notes, answers=asked, first=first, lost=lost, since=begun)

    def _gathered(self, asked: Asked, key: Hashable, within: float | None = None) -> Round:
        """key, within: as in `Fleet.gather`."""
        begun, orders, first = time.perf_counter(), asked.orders, asked.first
        try:
            forms = {order.worker: order.expected for order in orders.values()}
            with phase("receive"):
                outcome = self._fleet.gather(asked.answers, forms, key, within=within)
            # If one of these was refused, so was the task. But none may stay open: it would hold memory for ever.
            for worker in first.keys() & outcome.lost.keys() if first else ():
                self._fleet.owes(worker, first[worker])
            if open_ones := {worker: first[worker] for worker in first if worker in outcome.answers}:
                self._fleet.gather(open_ones, dict.fromkeys(open_ones, self._nothing), within=_AT_ONCE)
        finally:
            now = time.perf_counter()
            self.waiting_seconds += now - begun
        self._count(outcome.answers, now - asked.since)
        by = {seat: order.worker for seat, order in orders.items() if order.worker in outcome.answers}
        answers = {seat: outcome.answers[worker].tensors for seat, worker in by.items()}
        lent = {seat: outcome.answers[worker].release for seat, worker in by.items() if orders[seat].expected.lent}
        return Round(answers, by, asked.lost | outcome.lost, outcome.refused, outcome.impossible, lent)

    def warn_of_refusals(self, layer: Layer, first: Round, *passes: Pass) -> None:
        """If everybody refuses a pass, it is the task that is too large, or a limit too low: once, somebody is told.

        No error: workers could end a training with it. The enclave does the pass. Only the first round of a pass asks
        everybody: later ones ask those who stand in, of whom one may say what it likes.
        """
        done = {kind for tensors in first.answers.values() for kind in tensors}
        if self._warned or done.issuperset(passes) or len(first.lost) < 2 or not first.refused.issuperset(first.lost):
            return
        self._warned = True
        warnings.warn(
            f"layer {layer.label}: every worker refused its task, such as {first.lost[min(first.lost)]} The enclave "
            "does the pass itself, and all others that they refuse, without another warning: that is slow, and the "
            "ledger counts it. Use smaller batches, or give workers more memory.",
            RuntimeWarning,
            stacklevel=2,
        )

    def question(self, weights: SentWeights, *, orders: Mapping[int, Order], key: Hashable) -> Round:
        """The same for workers that are suspected. Whoever does not answer has nothing to say, which is no fault.

        key: of the pass that they answered wrongly; this is less work.
        """
        within = max(_AT_ONCE, self._fleet.late_after(key))
        with self.asking():
            return self._gathered(self._sent(weights, orders), key=None, within=within)

    def outside_field(self, layer: Layer, call: int, kind: Pass, by: Mapping[int, int]) -> None:
        """As after a round whose answers' range the fleet has checked, for those that it has not."""
        for seat, worker in by.items():
            complaint = f"{kind.value}: an answer with {_OUTSIDE}"
            self._fleet.expel(worker, complaint)
            reason = f"worker {worker} ({self.name(worker)}) failed: {complaint}."
            self._ledger.record(Missed(layer=layer.label, worker=self.name(worker), reason=reason))
            self._blame(worker, (layer.label, seat, call, kind), "range", _OUTSIDE)

    def expel(self, worker: int, reason: str) -> None:
        self._fleet.expel(worker, reason)

    def is_out(self, worker: int) -> bool:
        return worker in self._fleet.quarantined

    def _blame(self, worker: int, asked: tuple[str, int, int, Pass], check: str, finding: str) -> None:
        layer, seat, call, kind = asked
        name = self.name(worker)
        self._ledger.record(
            Blamed(layer=layer, call=call, kind=kind, check=check, worker=name, seat=seat, finding=finding)
        )

    def _blame_for_form(self) -> None:
        """The ledger hears who broke the protocol, also between two calls; the evidence is what it was asked last.

        One that was never asked anything kept nobody from a result.
        """
        quarantined = self._fleet.quarantined
        if not quarantined and not self._convicted:
            return
        out = {worker for worker, reason in quarantined.items() if reason.startswith(_BROKE)}
        for worker in sorted(out - self._convicted):
            if worker in self._asked:
                self._blame(worker, self._asked[worker], "form", "something else than an answer to what it was asked")
        self._convicted = out

    def _count(self, answers: Mapping[int, Answer], since: float) -> None:
        """since: seconds since they were asked. They can have worked no longer."""
        received = 0
        for answer in answers.values():
            self.worker_seconds += min(answer.seconds, since)
            for tensor in answer.tensors.values():
                received += tensor.nbytes
        self._ledger.record(Traffic(sent=0, received=received))

    # --- weights and forgetting -------------------------------------------------------------------------------------
    def _given(self, weights: SentWeights, workers: Iterable[int]) -> dict[int, WorkerError]:
        """Posts the weights to those workers that do not have them in their present epoch; who could not be reached."""
        lost: dict[int, WorkerError] = {}
        given, fleet, sent = weights.given, self._fleet, 0
        try:
            for worker in workers:
                epoch = fleet.epoch(worker)
                if given.get(worker) == epoch:
                    continue
                self._epochs[worker] = epoch
                try:
                    fleet.post(worker, weights.message or self._message(weights))
                except WorkerError as error:
                    lost[worker] = error
                else:
                    given[worker] = epoch  # only now: a post that was interrupted is repeated
                    sent += weights.tensor.nbytes
        finally:
            if sent:
                self._ledger.record(Traffic(sent=sent, received=0))
        return lost

    def _message(self, weights: SentWeights) -> Weights:
        """The one object that everybody is posted."""
        if weights.message is None:
            outdated = (weights.layer, weights.version), weights.tensor.nbytes
            weakref.finalize(weights, self._outdated.append, outdated).atexit = False
            weights.message = Weights(
                layer=weights.layer,
                version=weights.version,
                op=weights.op.spec(),
                prime=self._prime,
                tensor=weights.tensor,
            )
        return weights.message

    def forget_with(self, owner: object, call: int, nbytes: int) -> None:
        """Workers forget the shares of the call, each of so many bytes, when `owner` is gone. The finalizer only writes
        it down.
        """
        weakref.finalize(owner, self._forgotten.append, (call, nbytes)).atexit = False

    def forget(self, *, worth: bool = False) -> None:
        """Tells workers which calls and weights are over. worth: only if that is worth a message to each of them."""
        calls, weights = _copied(self._forgotten), _copied(self._outdated)
        if not calls and not weights:
            return
        sizes = [nbytes for _, nbytes in (*calls, *weights)]
        if worth and sum(sizes) < WORTH and len(sizes) < MANY:
            return
        message = Forget(calls=tuple([call for call, _ in calls]), weights=tuple([key for key, _ in weights]))
        for worker, epoch in self._epochs.items():  # nobody gets a share without weights
            if self._fleet.epoch(worker) == epoch:  # or else it began with an empty memory
                with suppress(WorkerError, FleetError):  # one that is gone remembers nothing
                    self._fleet.post(worker, message)
        for call in message.calls:
            self.custody.forget(call)
        for queue, count in ((self._forgotten, len(calls)), (self._outdated, len(weights))):
            for _ in range(count):  # only now: a post that was interrupted is repeated
                queue.popleft()


def _copied(queue: deque[T]) -> tuple[T, ...]:
    """By index, because finalizers may append at any moment, which an iterator does not survive."""
    return tuple(queue[place] for place in range(len(queue)))
