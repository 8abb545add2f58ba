"""Max pooling by a kernel of our own: as a function of itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from darknight.kernels import compiled_layers as kernels
from darknight.kernels.compiled_layers import Library, Window


def window_of(
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Window | None:
    """The arguments of F.max_pool2d, behind its input; None where it does more than a kernel of ours."""
    if ceil_mode or return_indices or pair(dilation) != (1, 1):
        return None
    kernel = pair(kernel_size)
    return Window(kernel, kernel if stride is None or stride == () else pair(stride), pair(padding))


def pooled(library: Library, input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """F.max_pool2d; None if it is torch's."""
    window = window_of(*args, **kwargs)
    if window is None or not ordinary(input) or not kernels.can_pool(input, window):
        return None
    if torch.is_grad_enabled() and input.requires_grad:
        derived: Tensor = _Pooled.apply(input, window, library)  # type: ignore[no-untyped-call]
        return derived
    found = kernels.pool(library, input, window, keep=False)
    return None if found is None else found[0]


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window, library: Library) -> Tensor:
        found = kernels.pool(library, x, window, keep=True)
        assert found is not None, "it was asked before"
        y, taps = found
        ctx.save_for_backward(x, taps)
        ctx.call = (library, window)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        library, window = ctx.call
        x, taps = ctx.saved_tensors
        found = None
        if not torch.is_grad_enabled():
            found = kernels.unpool(library, grad.contiguous(), taps, x.shape, window)
        if found is None:
            again = torch.is_grad_enabled()
            with torch.enable_grad():
                y = F.max_pool2d(x, window.kernel, window.step, window.before)
                (found,) = torch.autograd.grad(y, x, grad, create_graph=again)
        return found, None, None


def pair(value: Any) -> tuple[int, int]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return (int(numbers[0]), int(numbers[-1]))


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether they are torch's own tensors, and nothing but values: a subclass may have ideas of its own, and what
    torch.func or forward-mode derivatives follow is more than its memory says.
    """
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return False
    return all(each is None or type(each) in (Tensor, nn.Parameter) for each in tensors)
