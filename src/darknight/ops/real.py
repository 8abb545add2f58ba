"""The passes on float shares.

Shares are mostly noise: at the paper's sigma = 2e4 the result is ten thousand times smaller than the partial sums, and
a sum in float32 loses it (Conv2d(512, 512, 3): relative error 0.19, against 0.004 when summed in float64). So products
are summed in float64 whatever the wire's dtype, and rounded to it once: docs/adr/0003.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from darknight.ops.op import BilinearOp, Shape, in_blocks


def forward(op: BilinearOp, x: Tensor, w: Tensor) -> Tensor:
    left, y_shape = x.to(torch.float64), op.output_shape(tuple(x.shape), tuple(w.shape))

    def part(block: slice) -> Tensor:
        return op.forward(left, w[block].to(torch.float64)).to(x.dtype)

    return in_blocks(op.output_blocks(tuple(w.shape)), -1, y_shape, part)


def grad_input(op: BilinearOp, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
    left = delta.to(torch.float64)

    def part(block: slice) -> Tensor:
        right = w[:, block].to(torch.float64)
        shape = x_shape if block == slice(None) else (*x_shape[:-1], right.shape[1])
        return op.grad_input(left, right, shape).to(delta.dtype)

    return in_blocks(op.input_blocks(tuple(w.shape)), -1, x_shape, part)


def grad_weight(op: BilinearOp, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
    left, right = x.to(torch.float64), delta.to(torch.float64)

    def part(block: slice) -> Tensor:
        if block == slice(None):
            return op.grad_weight(left, right, w_shape).to(x.dtype)
        rows = right[..., block]
        return op.grad_weight(left, rows, (rows.shape[-1], *w_shape[1:])).to(x.dtype)

    return in_blocks(op.output_blocks(w_shape), 0, w_shape, part)


def combine_clear(row: Sequence[float], groups: Tensor) -> Tensor:
    """sum_i beta_ji delta_i: the worker's part of Eq. 4 with gradients in the clear; (group, input, *feature)."""
    total = torch.zeros_like(groups[:, 0], dtype=torch.float64)
    for coefficient, deltas in zip(row, groups.unbind(1), strict=True):
        total.add_(deltas, alpha=coefficient)
    return total.to(groups.dtype)
