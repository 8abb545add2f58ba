"""Depthwise convolutions that stay in the enclave, by a kernel of our own.

torch's take several times what their bytes take to be read and written. Results agree with torch's within the rounding
of float32, and are the same on every processor that has the kernels. What the kernel is not made for is torch's own.
Where no gradient comes back, a normalisation in evaluation and an activation behind it are done in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from darknight.kernels import compiled_depthwise as kernels
from darknight.kernels import compiled_layers
from darknight.kernels.compiled_depthwise import Library
from darknight.kernels.compiled_layers import Affine, Window
from darknight.nn.behind import Behind, Finished, needs_grad
from darknight.nn.pooling import ordinary, pair

_SMALLEST = 49  # outputs of a channel: in smaller images torch's takes half as long


def convolved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], following: Callable[[Tensor], Finished]
) -> tuple[Tensor, Behind] | None:
    """The result, and what was done to it already, if there is a kernel for this call; None if it is torch's.

    following: says what stands behind a product with a weight.
    """
    library = kernels.chosen() if func is torch.conv2d else None
    if library is None or torch.is_autocast_enabled("cpu"):
        return None
    return _convolved(library, following, *args, **kwargs)


def _convolved(
    library: Library,
    following: Callable[[Tensor], Finished],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> tuple[Tensor, Behind] | None:
    if groups < 2 or groups != weight.shape[0] or isinstance(padding, str) or pair(dilation) != (1, 1):
        return None
    if weight.dim() != 4 or not ordinary(input, weight, bias):
        return None
    window = Window((weight.shape[2], weight.shape[3]), pair(stride), pair(padding))
    if not kernels.can_convolve(input, weight, bias, window):
        return None
    if prod(window.outputs(input.shape[2], input.shape[3])) < _SMALLEST:
        return None
    operands = (input, weight, bias)
    if needs_grad(*operands):
        return _Convolved.apply(*operands, window, library), Behind()  # type: ignore[no-untyped-call]
    scaling, behind = _finished(following(weight), groups)
    y = kernels.convolve(library, input, weight, bias, window, scaling, behind.limits)
    assert y is not None, "it was asked before"
    return y, behind


def _finished(following: Finished, channels: int) -> tuple[Affine | None, Behind]:
    """What of it can be done at once."""
    layers, norm = compiled_layers.chosen(), following.norm
    if layers is None or (norm is not None and needs_grad(norm.weight, norm.bias)):
        return None, Behind()
    if norm is None:
        return None, Behind(limits=following.limits)
    scaling = compiled_layers.by_running(layers, *norm.operands, norm.epsilon)
    if scaling is None or not scaling.of(channels):
        return None, Behind()
    return scaling, Behind(norm=norm, limits=following.limits)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, library: Library) -> Tensor:
        y = kernels.convolve(library, x, weight, bias, window)
        assert y is not None, "it was asked before"
        ctx.save_for_backward(x, weight, bias)
        ctx.call = (library, window)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        library, window = ctx.call
        x, weight, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        found = None
        if not torch.is_grad_enabled():
            found = kernels.convolve_back(library, x, weight, grad.contiguous(), window, wanted)
        if found is None:  # it is to be derived again (create_graph=True), or came in another dtype
            found = _by_torch(x, weight, bias, grad, window, wanted)
        return *found, None, None


def _by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, window: Window, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same gradients, by torch and with a graph of their own."""
    operands = [each for each, asked in zip((x, weight, bias), wanted, strict=True) if asked and each is not None]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        y = F.conv2d(x, weight, bias, window.step, window.before, 1, x.shape[1])
        found = iter(torch.autograd.grad(y, operands, grad, create_graph=again))
    gx, gw, gb = (next(found) if asked else None for asked in wanted)
    return gx, gw, gb
