"""Workers as threads, some of which lie."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

import darknight as dk
from darknight.fleet import Fleet, Member
from darknight.types import Answer, Pass
from darknight.wire import in_process
from darknight.worker import Executor, serve
from runtime.scripts import batch


class Liar(Executor):
    """A worker that changes one element of its answers for one pass."""

    def __init__(self, kind: Pass, lie) -> None:
        super().__init__()
        self._kind = kind
        self._lie = lie

    def handle(self, message):
        answer = super().handle(message)
        if answer is None or self._kind not in answer.tensors:
            return answer
        tensors = {
            kind: self._lie(tensor.clone()) if kind is self._kind else tensor for kind, tensor in answer.tensors.items()
        }
        return Answer(layer=answer.layer, call=answer.call, tensors=tensors, seconds=answer.seconds)


def fleet_with(scheme: dk.Scheme, executors: dict[int, Executor]) -> Fleet:
    """A fleet in which some workers run an executor of ours."""

    def member(number: int) -> Member:
        def dial():
            link, seat = in_process()
            threading.Thread(target=serve, args=(seat, executors.get(number) or Executor()), daemon=True).start()
            return link

        return Member(f"w{number}", f"operator-{number}", dial)

    return Fleet([member(number) for number in range(scheme.workers)])


def off_by_one(answer: Tensor) -> Tensor:
    """The smallest lie that the field knows; in real arithmetic, a tenth of the largest value."""
    flat = answer.view(-1)
    if answer.dtype == torch.int32:
        flat[0] = flat[0] - 1 if flat[0] > 0 else 1
    else:
        flat[0] += 0.1 * answer.abs().max()
    return answer


def step(model, examples=6):
    x, target = batch(examples)
    x.requires_grad_()
    torch.nn.functional.cross_entropy(model(x), target).backward()
