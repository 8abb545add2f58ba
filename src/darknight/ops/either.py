"""The passes in either arithmetic: in the field of `prime`, or in floats if it is None.

Workers compute them on shares; the enclave does too, for a worker that is missing, and gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from darknight.ops import field, real
from darknight.ops.op import BilinearOp


def forward(op: BilinearOp, x: Tensor, w: Tensor, prime: int | None) -> Tensor:
    """y = <w, x>, with the first axis of x left as it is."""
    return real.forward(op, x, w) if prime is None else field.forward(op, x, w, prime)


def grad_input(op: BilinearOp, delta: Tensor, w: Tensor, x_shape: tuple[int, ...], prime: int | None) -> Tensor:
    """gx = <w, delta>^T, with the first axis of delta left as it is."""
    if prime is None:
        return real.grad_input(op, delta, w, x_shape)
    return field.grad_input(op, delta, w, x_shape, prime)


def grad_weight(op: BilinearOp, x: Tensor, delta: Tensor, w_shape: tuple[int, ...], prime: int | None) -> Tensor:
    """gw = <delta, x>, summed over the first axis."""
    if prime is None:
        return real.grad_weight(op, x, delta, w_shape)
    return field.grad_weight(op, x, delta, w_shape, prime)


def combine_clear(row: Sequence[float], deltas: Tensor, prime: int | None) -> Tensor:
    """The share of gradients that went out in the clear, with the coefficients of one worker."""
    if prime is None:
        return real.combine_clear(row, deltas)
    return field.combine_clear([int(value) for value in row], deltas, prime)
