"""What multiplies: the three passes of a layer on whatever hardware the operator has, behind one interface."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from darknight.errors import UsageError
from darknight.ops import BilinearOp
from darknight.types import Weights
from darknight.worker.choice import MEASURED, Choice, largest_of


class Engine(Protocol):
    """Computes the passes of one layer. Answers are on the CPU, and the same bits whichever engine gave them (field).

    `weights.tensor`, x and delta come as `place` gave them back. Engines do not judge what they are asked: raises
    OpError where an op and its operands do not fit, or where nothing is left to compute on.
    """

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor where this engine wants weights and shares to be kept."""

    def forward(self, weights: Weights, op: BilinearOp, x: Tensor) -> Tensor: ...

    def grad_input(self, weights: Weights, op: BilinearOp, delta: Tensor, x_shape: tuple[int, ...]) -> Tensor: ...

    def grad_weight(self, weights: Weights, op: BilinearOp, x: Tensor, delta: Tensor) -> Tensor: ...

    def forget(self, weights: Weights) -> None:
        """These weights will not be used again: lets go of what the engine made of them. Unknown ones do no harm."""

    def close(self) -> None:
        """Lets go of everything. A second time does nothing."""


class LocalEngine:
    """One device of this machine.

    threads: how many threads of the processor torch uses, for the whole process; None leaves it to torch.
    strategy: how passes in the field are computed (darknight.worker.choice); the results are the same.
    """

    def __init__(
        self, device: torch.device | None = None, threads: int | None = None, strategy: str = MEASURED
    ) -> None:
        self.device = device or torch.device("cpu")
        if threads is not None:
            if threads < 1:
                raise UsageError(f"{threads} threads; at least 1 is needed to compute.")
            torch.set_num_threads(threads)
        self.choice = Choice(self.device, strategy)
        self._largest: weakref.WeakKeyDictionary[Weights, float] = weakref.WeakKeyDictionary()

    def place(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":  # from pinned memory a GPU fetches it by itself, at the full speed of the bus
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def forward(self, weights: Weights, op: BilinearOp, x: Tensor) -> Tensor:
        return self._back(self.choice.forward(op, x, weights.tensor, weights.prime, self._bound(weights)))

    def grad_input(self, weights: Weights, op: BilinearOp, delta: Tensor, x_shape: tuple[int, ...]) -> Tensor:
        w, bound = weights.tensor, self._bound(weights)
        return self._back(self.choice.grad_input(op, delta, w, x_shape, weights.prime, bound))

    def grad_weight(self, weights: Weights, op: BilinearOp, x: Tensor, delta: Tensor) -> Tensor:
        return self._back(self.choice.grad_weight(op, x, delta, tuple(weights.tensor.shape), weights.prime))

    def forget(self, weights: Weights) -> None:
        self._largest.pop(weights, None)

    def close(self) -> None:
        """Nothing is held."""

    def _bound(self, weights: Weights) -> float | None:
        """The largest |weight|, looked for once: weights serve two passes."""
        if weights.prime is None:
            return None
        if weights not in self._largest:
            self._largest[weights] = largest_of(weights.tensor)
        return self._largest[weights]

    def _back(self, found: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return found.cpu()
        answer = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        answer.copy_(found)
        return answer


def device_named(text: str) -> torch.device:
    """The device "cpu" or "cuda:N", if this machine has it; raises UsageError in words otherwise."""
    if text == "cpu":
        return torch.device("cpu")
    kind, _, number = text.partition(":")
    if kind != "cuda" or (number and not (number.isascii() and number.isdecimal())):
        raise UsageError(f'device "{text[:40]}" is none that a worker knows; use cpu or cuda:N.')
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(number) if number else 0
    if index >= found:
        has = f"it has {found} CUDA device{'s' if found != 1 else ''}"
        which = f"cuda:0 to cuda:{found - 1}, or cpu" if found else "cpu"
        raise UsageError(f"device cuda:{index} is not in this machine: {has}. Use {which}.")
    return torch.device("cuda", index)
