"""The passes on float shares.

Shares are mostly noise: at the paper's sigma = 2e4 the result is ten thousand times smaller than the partial sums, and
a sum in float32 loses it (Conv2d(512, 512, 3): relative error 0.19, against 0.004 when summed in float64). So products
are summed in float64 whatever the wire's dtype, and rounded to it once: docs/adr/0003.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from darknight.ops.op import BilinearOp, Shape


def forward(op: BilinearOp, x: Tensor, w: Tensor) -> Tensor:
    return op.forward(x.to(torch.float64), w.to(torch.float64)).to(x.dtype)


def grad_input(op: BilinearOp, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
    return op.grad_input(delta.to(torch.float64), w.to(torch.float64), x_shape).to(delta.dtype)


def grad_weight(op: BilinearOp, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
    return op.grad_weight(x.to(torch.float64), delta.to(torch.float64), w_shape).to(x.dtype)


def combine_clear(row: Sequence[float], groups: Tensor) -> Tensor:
    """sum_i beta_ji delta_i: the worker's part of Eq. 4 with gradients in the clear; (group, input, *feature)."""
    total = torch.zeros_like(groups[:, 0], dtype=torch.float64)
    for coefficient, deltas in zip(row, groups.unbind(1), strict=True):
        total.add_(deltas, alpha=coefficient)
    return total.to(groups.dtype)
