"""1x1 convolutions that stay in the enclave, as products of matrices where images are large and channels few.

torch's bring images into an order of their own first, and back, which takes as long as the arithmetic if there are few
channels. A product of matrices reads them where they lie. Results agree with torch's within the rounding of float32.
What this is not made for is torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from darknight.kernels.compiled_layers import suits, vector
from darknight.nn.behind import needs_grad
from darknight.nn.pooling import ordinary, pair

_SMALLEST = 28 * 28  # positions: in smaller images torch takes no longer, or less
_MOST = 64  # channels on the narrower side: the same


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result, if this call is a product of matrices; None if it is torch's."""
    if func is not torch.conv2d or torch.is_autocast_enabled("cpu"):
        return None
    return _pointwise(*args, **kwargs)


def _pointwise(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor | None:
    if weight.dim() != 4 or weight.shape[2:] != (1, 1) or groups != 1 or pair(stride) != (1, 1):
        return None
    if isinstance(padding, str) or pair(padding) != (0, 0) or not ordinary(input, weight, bias):
        return None
    operands = (input, weight, bias)
    if not _suits(*operands):
        return None
    if needs_grad(*operands):
        return _Pointwise.apply(*operands)  # type: ignore[no-untyped-call, no-any-return]
    return _product(*operands)


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product of matrices is torch's result, in torch's layout, and sooner there."""
    if not suits(x) or not suits(weight) or x.dim() != 4 or x.shape[1] != weight.shape[1]:
        return False
    if bias is not None and not vector(bias, len(weight)):
        return False
    large = x.shape[2] * x.shape[3] >= _SMALLEST and min(weight.shape[:2]) <= _MOST
    return large and not x.is_contiguous(memory_format=torch.channels_last)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.new_empty(len(x), len(weight), *x.shape[2:])  # no view of anything: an activation may be done in place
    matrices = weight.flatten(1).expand(len(x), -1, -1)
    if bias is None:
        torch.bmm(matrices, x.flatten(2), out=y.flatten(2))
    else:
        torch.baddbmm(bias.view(1, -1, 1), matrices, x.flatten(2), out=y.flatten(2))
    return y


class _Pointwise(torch.autograd.Function):
    """Its backward pass is of torch's functions, so that it can be derived again (create_graph=True)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted, deltas = ctx.needs_input_grad, grad.flatten(2)
        matrices = weight.flatten(1).t().expand(len(x), -1, -1)
        return (
            torch.bmm(matrices, deltas).view(x.shape) if wanted[0] else None,
            torch.bmm(deltas, x.flatten(2).transpose(1, 2)).sum(0).view(weight.shape) if wanted[1] else None,
            deltas.sum((0, 2)) if wanted[2] else None,
        )
