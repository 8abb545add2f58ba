"""Fully connected layers that stay in the enclave, by a kernel of our own where a batch has few rows.

torch's copy their weights on the way, which takes several times as long as reading them once. Results agree with
torch's within the rounding of float32, and those of a row do not depend on how many others there are. What the kernel
is not made for is torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from darknight.kernels import compiled_few_rows as kernels
from darknight.kernels.compiled_few_rows import Library
from darknight.nn.pooling import ordinary

_SMALLEST = 1 << 19  # numbers of a weight: smaller ones stay in the cache, where torch takes no longer


def multiplied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result, if there is a kernel for this call; None if it is torch's."""
    library = kernels.chosen() if func is F.linear else None
    if library is None or torch.is_autocast_enabled("cpu"):
        return None
    return _multiplied(library, *args, **kwargs)


def _multiplied(library: Library, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not ordinary(input, weight, bias) or weight.dim() != 2 or weight.numel() < _SMALLEST:
        return None
    if input.dim() == 0 or not input.is_contiguous() or input.shape[-1] != weight.shape[1]:
        return None
    x = input if input.dim() == 2 else input.reshape(-1, weight.shape[1])
    if not kernels.can_multiply(x, weight, bias):
        return None
    operands = (x, weight, bias)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in operands):
        y: Tensor | None = _Multiplied.apply(*operands, library)  # type: ignore[no-untyped-call]
    else:
        y = kernels.multiply(library, x, weight, bias)
    assert y is not None, "it was asked before"
    return y if input.dim() == 2 else y.reshape(*input.shape[:-1], len(weight))


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, library: Library) -> Tensor:
        y = kernels.multiply(library, x, weight, bias)
        assert y is not None, "it was asked before"
        ctx.save_for_backward(x, weight)
        ctx.library = library
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        found = None
        if not torch.is_grad_enabled():
            found = kernels.multiply_back(ctx.library, x, weight, grad.contiguous(), wanted)
        if found is None:  # it is to be derived again (create_graph=True), or came in another dtype
            found = (
                grad @ weight if wanted[0] else None,
                grad.t() @ x if wanted[1] else None,
                grad.sum(0) if wanted[2] else None,
            )
        return *found, None
