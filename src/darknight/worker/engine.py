"""What multiplies: the three passes of a layer on whatever hardware the operator has, behind one interface."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from darknight.errors import UsageError
from darknight.ops import BilinearOp, either
from darknight.types import Weights


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
    """

    def __init__(self, device: torch.device | None = None, threads: int | None = None) -> None:
        self.device = device or torch.device("cpu")
        if threads is not None:
            if threads < 1:
                raise UsageError(f"{threads} threads; at least 1 is needed to compute.")
            torch.set_num_threads(threads)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def forward(self, weights: Weights, op: BilinearOp, x: Tensor) -> Tensor:
        return either.forward(op, x, weights.tensor, weights.prime).cpu()

    def grad_input(self, weights: Weights, op: BilinearOp, delta: Tensor, x_shape: tuple[int, ...]) -> Tensor:
        return either.grad_input(op, delta, weights.tensor, x_shape, weights.prime).cpu()

    def grad_weight(self, weights: Weights, op: BilinearOp, x: Tensor, delta: Tensor) -> Tensor:
        return either.grad_weight(op, x, delta, tuple(weights.tensor.shape), weights.prime).cpu()

    def forget(self, weights: Weights) -> None:
        """Nothing is kept beside the weights themselves."""

    def close(self) -> None:
        """Nothing is held."""


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
