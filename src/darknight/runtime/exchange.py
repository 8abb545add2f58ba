"""The enclave's side of the conversation with its workers: numbers for calls, weights once a version, forgetting."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from darknight.accounting import Ledger, Traffic
from darknight.coding import Code, Field, Mixing, Scheme, group_count
from darknight.fleet import Fleet
from darknight.ops import BilinearOp
from darknight.runtime.layer import Layer, Saved, SentWeights
from darknight.types import Answer, BackwardTask, Expected, Forget, ForwardTask, Pass, Task, Weights

T = TypeVar("T")


class Exchange:
    """Talks to the fleet. Who takes part in which pass depends on the scheme alone, never on the data."""

    def __init__(self, scheme: Scheme, fleet: Fleet, ledger: Ledger) -> None:
        self._scheme = scheme
        self._fleet = fleet
        self._ledger = ledger
        self._calls = 0
        self._forgotten: deque[int] = deque()
        self._outdated: deque[tuple[str, int]] = deque()
        self._posted: weakref.WeakSet[SentWeights] = weakref.WeakSet()
        self.prime = scheme.arithmetic.prime if isinstance(scheme.arithmetic, Field) else None
        self.dtype = torch.int32 if isinstance(scheme.arithmetic, Field) else scheme.arithmetic.dtype
        self.waiting_seconds = 0.0
        self.worker_seconds = 0.0

    # --- calls ------------------------------------------------------------------------------------------------------
    def open_call(self) -> int:
        """A number that was never used before."""
        self._calls += 1
        return self._calls

    def forget_with(self, saved: Saved) -> None:
        """Workers forget the shares of the call when `saved` is gone. The finalizer only writes the number down."""
        weakref.finalize(saved, self._forgotten.append, saved.call).atexit = False

    # --- passes -----------------------------------------------------------------------------------------------------
    def forward(
        self, layer: Layer, op: BilinearOp, code: Code, shares: Tensor, weights: SentWeights, call: int, keep: bool
    ) -> dict[int, Tensor]:
        """Every worker gets its share; the answers of those that compute, by worker."""
        self._post_weights(weights)
        computing = self._computing(code.A)
        receiving = sorted({*computing, *(code.grad_rows if keep else ())})
        tasks: dict[int, Task] = {
            j: ForwardTask(
                layer=layer.name,
                call=call,
                version=weights.version,
                tensor=shares[j],
                compute=j in computing,
                keep=keep and j in code.grad_rows,
            )
            for j in receiving
        }
        shape = op.output_shape(tuple(shares.shape[1:]), tuple(weights.tensor.shape))
        expected = {
            j: Expected({Pass.FORWARD: shape} if j in computing else {}, self.dtype, self.prime) for j in receiving
        }
        answers = self._run(tasks, expected)
        return {j: answers[j].tensors[Pass.FORWARD] for j in computing}

    def backward(
        self, layer: Layer, saved: Saved, code: Code, deltas: Tensor, passes: tuple[Pass, ...]
    ) -> dict[Pass, dict[int, Tensor]]:
        """Deltas (worker, group, *feature), or in the clear (group, input, *feature); answers by pass and worker."""
        weights = saved.weights
        self._post_weights(weights)
        clear = not code.masks_gradients
        doing = {
            Pass.GRAD_INPUT: code.grad_rows if clear else self._computing(code.B),
            Pass.GRAD_WEIGHT: code.grad_rows,
        }
        share_shape = (group_count(saved.x_shape[0], self._scheme.inputs), *saved.x_shape[1:])
        shapes = {Pass.GRAD_INPUT: share_shape, Pass.GRAD_WEIGHT: tuple(weights.tensor.shape)}
        tasks: dict[int, Task] = {}
        expected = {}
        for j in sorted({worker for kind in passes for worker in doing[kind]}):
            own = tuple(kind for kind in passes if j in doing[kind])
            tasks[j] = BackwardTask(
                layer=layer.name,
                call=saved.call,
                version=weights.version,
                tensor=deltas if clear else deltas[j],
                passes=own,
                x_shape=share_shape,
                row=_coefficients(code.B.data[j], self.prime) if clear else None,
            )
            expected[j] = Expected({kind: shapes[kind] for kind in own}, self.dtype, self.prime)
        answers = self._run(tasks, expected)
        return {kind: {j: answers[j].tensors[kind] for j in doing[kind]} for kind in passes}

    def _computing(self, mixing: Mixing) -> tuple[int, ...]:
        """Workers whose answers are wanted: those that decode and the spares; with parity, all."""
        everyone = range(self._scheme.workers)
        if self._scheme.integrity in ("parity", "both"):
            return tuple(everyone)
        return tuple(j for j in everyone if j in mixing.base or j >= self._scheme.base_workers)

    # --- messages ---------------------------------------------------------------------------------------------------
    def _run(self, tasks: Mapping[int, Task], expected: Mapping[int, Expected]) -> dict[int, Answer]:
        self._post_forget()
        self._ledger.record(Traffic(sent=sum(task.tensor.nbytes for task in tasks.values()), received=0))
        begun = time.perf_counter()
        try:
            answers = self._fleet.dispatch(tasks, expected)
        finally:
            self.waiting_seconds += time.perf_counter() - begun
        self.worker_seconds += sum(answer.seconds for answer in answers.values())
        received = sum(tensor.nbytes for answer in answers.values() for tensor in answer.tensors.values())
        self._ledger.record(Traffic(sent=0, received=received))
        return answers

    def _post_weights(self, weights: SentWeights) -> None:
        if weights in self._posted:
            return
        message = Weights(
            layer=weights.layer,
            version=weights.version,
            op=weights.op.spec(),
            prime=self.prime,
            tensor=weights.tensor,
        )
        workers = range(self._scheme.workers)
        weakref.finalize(weights, self._outdated.append, (weights.layer, weights.version)).atexit = False
        self._fleet.post(message, workers)
        self._posted.add(weights)  # only now: a post that was interrupted is repeated
        self._ledger.record(Traffic(sent=weights.tensor.nbytes * len(workers), received=0))

    def _post_forget(self) -> None:
        calls, weights = _copied(self._forgotten), _copied(self._outdated)
        if calls or weights:
            self._fleet.post(Forget(calls=calls, weights=weights), range(self._scheme.workers))
            for queue, count in ((self._forgotten, len(calls)), (self._outdated, len(weights))):
                for _ in range(count):  # only now: a post that was interrupted is repeated
                    queue.popleft()


def _coefficients(row: tuple[object, ...], prime: int | None) -> tuple[float, ...]:
    return tuple(float(value) if prime is None else int(value) for value in row)  # type: ignore[arg-type, call-overload]


def _copied(queue: deque[T]) -> tuple[T, ...]:
    """By index, because finalizers may append at any moment, which an iterator does not survive."""
    return tuple(queue[place] for place in range(len(queue)))
