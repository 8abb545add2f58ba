"""A worker's part of a pass, done in the enclave, on the share that the worker should have had."""

from __future__ import annotations

from torch import Tensor

from darknight.ops import field, real
from darknight.runtime.layer import SentWeights


class OwnPart:
    """What an honest worker would have answered, bit for bit. prime: None for real arithmetic."""

    def __init__(self, prime: int | None) -> None:
        self._prime = prime

    def forward(self, weights: SentWeights, share: Tensor) -> Tensor:
        if self._prime is None:
            return real.forward(weights.op, share, weights.tensor)
        return field.forward(weights.op, share, weights.tensor, self._prime)

    def grad_input(self, weights: SentWeights, delta: Tensor, x_shape: tuple[int, ...]) -> Tensor:
        if self._prime is None:
            return real.grad_input(weights.op, delta, weights.tensor, x_shape)
        return field.grad_input(weights.op, delta, weights.tensor, x_shape, self._prime)

    def grad_weight(self, weights: SentWeights, share: Tensor, delta: Tensor) -> Tensor:
        shape = tuple(weights.tensor.shape)
        if self._prime is None:
            return real.grad_weight(weights.op, share, delta, shape)
        return field.grad_weight(weights.op, share, delta, shape, self._prime)

    def combined(self, row: tuple[float, ...], deltas: Tensor) -> Tensor:
        """The share of gradients that went out in the clear."""
        if self._prime is None:
            return real.combine_clear(row, deltas)
        return field.combine_clear([int(value) for value in row], deltas, self._prime)
