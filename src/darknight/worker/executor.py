"""What a worker does with a message: keep weights, multiply shares, keep shares, forget."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from darknight.errors import OpError
from darknight.ops import BilinearOp, from_spec
from darknight.ops import field as field_ops
from darknight.ops import real as real_ops
from darknight.types import Answer, BackwardTask, Forget, ForwardTask, Message, Pass, Weights


class Executor:
    """The state of one worker: weights by layer and version, its own input shares by call.

    `turn` is entered while computing. Workers that share one processor take turns, because torch uses all its cores
    for each of them.
    """

    def __init__(self, turn: AbstractContextManager[object] | None = None) -> None:
        self._turn = turn or nullcontext()
        self._weights: dict[tuple[str, int], tuple[Weights, BilinearOp]] = {}
        self._shares: dict[int, Tensor] = {}

    @torch.no_grad()
    def handle(self, message: Message) -> Answer | None:
        """The answer to a task; None for a message that has none. Raises OpError on what cannot be done."""
        match message:
            case Weights():
                self._weights[message.layer, message.version] = (message, from_spec(message.op))
            case Forget(everything=True):
                self._shares.clear()
                self._weights.clear()
            case Forget():
                for call in message.calls:
                    self._shares.pop(call, None)
                for key in message.weights:
                    self._weights.pop(key, None)
            case ForwardTask() | BackwardTask():
                weights, op = self._lookup(message)
                with self._turn:
                    begun = time.perf_counter()
                    if isinstance(message, ForwardTask):
                        tensors = self._forward(message, weights, op)
                    else:
                        tensors = self._backward(message, weights, op)
                    seconds = time.perf_counter() - begun
                return Answer(layer=message.layer, call=message.call, tensors=tensors, seconds=seconds)
        return None

    def _forward(self, task: ForwardTask, weights: Weights, op: BilinearOp) -> dict[Pass, Tensor]:
        if task.keep:
            self._shares[task.call] = task.tensor
        if not task.compute:
            return {}
        if weights.prime is None:
            return {Pass.FORWARD: real_ops.forward(op, task.tensor, weights.tensor)}
        return {Pass.FORWARD: field_ops.forward(op, task.tensor, weights.tensor, weights.prime)}

    def _backward(self, task: BackwardTask, weights: Weights, op: BilinearOp) -> dict[Pass, Tensor]:
        share = task.tensor if task.row is None else _combined(task.row, task.tensor, weights.prime)
        results = {}
        w, prime = weights.tensor, weights.prime
        if Pass.GRAD_INPUT in task.passes:
            if prime is None:
                results[Pass.GRAD_INPUT] = real_ops.grad_input(op, share, w, task.x_shape)
            else:
                results[Pass.GRAD_INPUT] = field_ops.grad_input(op, share, w, task.x_shape, prime)
        if Pass.GRAD_WEIGHT in task.passes:
            x = self._shares.get(task.call)
            if x is None:
                raise OpError(f"layer {task.layer}: no input share is kept for call {task.call}.")
            if prime is None:
                results[Pass.GRAD_WEIGHT] = real_ops.grad_weight(op, x, share, tuple(w.shape))
            else:
                results[Pass.GRAD_WEIGHT] = field_ops.grad_weight(op, x, share, tuple(w.shape), prime)
        return results

    def _lookup(self, task: ForwardTask | BackwardTask) -> tuple[Weights, BilinearOp]:
        try:
            return self._weights[task.layer, task.version]
        except KeyError:
            raise OpError(f"layer {task.layer}: weights of version {task.version} never arrived.") from None


def _combined(row: tuple[float, ...], deltas: Tensor, prime: int | None) -> Tensor:
    if prime is None:
        return real_ops.combine_clear(row, deltas)
    return field_ops.combine_clear([int(value) for value in row], deltas, prime)
