"""What a worker does with a message: keep weights, multiply shares, keep shares, forget."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from darknight.errors import OpError
from darknight.ops import BilinearOp, either, from_spec
from darknight.ops.estimate import Reach, task_bytes
from darknight.ops.strategy import round_up
from darknight.types import Answer, BackwardTask, Forget, ForwardTask, Message, Pass, TooLarge, Weights
from darknight.wire.seeds import scratch_bytes, share_of
from darknight.worker.budget import Budget
from darknight.worker.choice import largest_of
from darknight.worker.engine import Engine, LocalEngine

_ANSWER = "answer"

# Reasons are remembered for the tasks that come next, not for an enclave that fills memory with them.
_MOST_REASONS = 256


# Every step brings the same layers with other weights.
_op_of = lru_cache(maxsize=1024)(from_spec)
_reach_of = lru_cache(maxsize=1024)(Reach.of)


@dataclass(frozen=True, eq=False)
class _Kept:
    """Weights, with what a task needs to know of them."""

    weights: Weights
    op: BilinearOp
    reach: Reach


class Executor:
    """The state of one enclave at a worker: weights by layer and version, its own input shares by call.

    `turn` is entered while computing: sessions that share one processor take turns. `budget` is asked before anything
    is kept or computed; without one there is no limit. Not for several threads at once.
    """

    def __init__(
        self,
        turn: AbstractContextManager[object] | None = None,
        *,
        engine: Engine | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._turn = turn or nullcontext()
        self._engine = engine or LocalEngine()
        self._budget = budget or Budget()
        self._weights: dict[tuple[str, int], _Kept] = {}
        self._shares: dict[int, Tensor] = {}
        self._reasons: dict[tuple[str, int], str] = {}

    @torch.no_grad()
    def handle(self, message: Message | TooLarge) -> Answer | None:
        """The answer to a task; None for a message that has none. Raises OpError on what cannot be done.

        Weights that could not be kept are refused again, with the same reason, by each task that needs them.
        """
        match message:
            case TooLarge():
                if message.version is not None:
                    self._remember((message.layer, message.version), message.reason)
                raise OpError(message.reason)
            case Weights():
                self._budget.arrived(message.tensor.nbytes)
                try:
                    self._keep_weights(message)
                except Exception as error:
                    self._remember((message.layer, message.version), str(error))
                    raise
            case Forget():
                self._forget(message)
            case ForwardTask() | BackwardTask():
                self._budget.arrived(message.tensor.nbytes)
                return self._compute(message)
        return None

    def forget_everything(self) -> None:
        self._forget(Forget(everything=True))

    def _keep_weights(self, message: Weights) -> None:
        key, tensor = (message.layer, message.version), message.tensor
        op = _op_of(message.op)
        self._budget.keep(key, tensor.nbytes)
        largest = 0.0 if message.prime is None else round_up(largest_of(tensor))
        reach = _reach_of(op, tuple(tensor.shape), largest)
        self._drop_weights(key)
        self._reasons.pop(key, None)
        self._weights[key] = _Kept(replace(message, tensor=self._engine.place(tensor)), op, reach)

    def _forget(self, message: Forget) -> None:
        calls = list(self._shares) if message.everything else message.calls
        keys = [*self._weights, *self._reasons] if message.everything else message.weights
        for call in calls:
            self._shares.pop(call, None)
            self._budget.release(call)
        for key in keys:
            self._drop_weights(key)
            self._reasons.pop(key, None)
            self._budget.release(key)
        if message.everything:
            self._budget.release(_ANSWER)

    def _drop_weights(self, key: tuple[str, int]) -> None:
        kept = self._weights.pop(key, None)
        if kept is not None:
            self._engine.forget(kept.weights)

    def _remember(self, key: tuple[str, int], reason: str) -> None:
        self._drop_weights(key)
        self._budget.release(key)
        if len(self._reasons) >= _MOST_REASONS:
            self._reasons.pop(next(iter(self._reasons)))
        self._reasons[key] = reason

    def _compute(self, task: ForwardTask | BackwardTask) -> Answer:
        kept = self._lookup(task)
        if task.seed is not None and task.seed.prime != kept.weights.prime:
            raise OpError(f"layer {task.layer}: a seed of another field than the weights'.")
        keeps = isinstance(task, ForwardTask) and task.keep
        if keeps:
            self._budget.keep(task.call, task.tensor.nbytes)
        try:
            own = scratch_bytes(task) + (0 if keeps else task.tensor.nbytes)
            with self._budget.working(own + task_bytes(task, kept.weights, kept.op, kept.reach)), self._turn:
                begun = time.perf_counter()
                share = self._engine.place(share_of(task))
                if isinstance(task, ForwardTask):
                    tensors = self._forward(task, share, kept)
                else:
                    tensors = self._backward(task, share, kept)
                seconds = time.perf_counter() - begun
        except BaseException:
            if keeps:  # a refused task leaves nothing behind
                self._shares.pop(task.call, None)
                self._budget.release(task.call)
            raise
        # It may still be on its way while the next task is computed. One at a time: the seat sees to that.
        self._budget.release(_ANSWER)
        if tensors:
            self._budget.keep(_ANSWER, sum(tensor.nbytes for tensor in tensors.values()))
        return Answer(layer=task.layer, call=task.call, tensors=tensors, seconds=seconds)

    def _forward(self, task: ForwardTask, share: Tensor, kept: _Kept) -> dict[Pass, Tensor]:
        if task.keep:
            self._shares[task.call] = share
        return {Pass.FORWARD: self._engine.forward(kept.weights, kept.op, share)} if task.compute else {}

    def _backward(self, task: BackwardTask, share: Tensor, kept: _Kept) -> dict[Pass, Tensor]:
        if task.row is not None:
            share = either.combine_clear(task.row, share, kept.weights.prime)
        results = {}
        if Pass.GRAD_INPUT in task.passes:
            results[Pass.GRAD_INPUT] = self._engine.grad_input(kept.weights, kept.op, share, task.x_shape)
        if Pass.GRAD_WEIGHT in task.passes:
            x = self._shares.get(task.call)
            if x is None:
                raise OpError(f"layer {task.layer}: no input share is kept for call {task.call}.")
            if tuple(x.shape) != task.x_shape:  # what the memory was estimated for
                raise OpError(
                    f"layer {task.layer}: the input share kept for call {task.call} has shape {tuple(x.shape)}; "
                    f"the task says {task.x_shape}."
                )
            results[Pass.GRAD_WEIGHT] = self._engine.grad_weight(kept.weights, kept.op, x, share)
        return results

    def _lookup(self, task: ForwardTask | BackwardTask) -> _Kept:
        key = (task.layer, task.version)
        if key in self._weights:
            return self._weights[key]
        if key in self._reasons:
            raise OpError(f"layer {task.layer}: weights of version {task.version} were refused: {self._reasons[key]}")
        raise OpError(f"layer {task.layer}: weights of version {task.version} never arrived.")
