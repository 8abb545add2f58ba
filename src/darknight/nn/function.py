"""A protected product in the autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from darknight.errors import OpError, ProtectError
from darknight.kernels import compiled_layers as kernels
from darknight.kernels.compiled_layers import Affine, Window
from darknight.nn.behind import NOTHING, Behind, Finished, Norm, needs_grad
from darknight.ops import BilinearOp
from darknight.runtime import Finish, Layer, Runtime
from darknight.types import Pass


def product(
    runtime: Runtime,
    layer: Layer,
    op: BilinearOp,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    following: Finished = NOTHING,
) -> tuple[Tensor, Behind]:
    """<w, x> + bias, with <w, x> and its gradients computed through `runtime`; and what stands behind it.

    x has its examples along the first axis, or is a single example without that axis. following: what may be done to
    the result; whether it was, is said by what stands behind it.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise ProtectError(f"layer {layer.label}: a protected model cannot be traced. Call dk.unprotect_ first.")
    if x.is_nested or x.layout != torch.strided:
        raise OpError(f"layer {layer.label}: its input is nested or sparse; needs a dense tensor.")
    single = x.dim() == w.dim() - 1
    # As torch does it: autocast leaves float64 alone.
    autocast = torch.is_autocast_enabled("cpu") and torch.float64 not in (x.dtype, w.dtype)
    if x.dtype != w.dtype and not autocast:
        raise OpError(
            f"layer {layer.label}: its input is {x.dtype} and its weight {w.dtype}; needs one dtype. Convert one."
        )
    if bias is not None and bias.dtype != w.dtype and not autocast:
        raise OpError(f"layer {layer.label}: its bias is {bias.dtype} and its weight {w.dtype}; needs one dtype.")
    batch = x.unsqueeze(0) if single else x
    keep = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
    by_channel = bias is not None and bias.dim() == 1
    in_one = dtype == torch.float32 and type(x) is Tensor and not single and (bias is None or by_channel)
    behind = Behind(channel=1 if w.dim() > 2 else -1)
    scaling = None
    with torch._C.DisableTorchFunction():  # what happens inside is no concern of an active function mode
        if in_one and following.norm is not None and not autocast:
            scaling = _scaling(op, x, w, bias, following.norm)
        if in_one and kernels.chosen() is not None and (scaling is not None or following.norm is None):
            behind.norm, behind.limits, behind.window = following
        call = (runtime, layer, op, keep, dtype, behind, scaling)  # as one: torch looks at every argument
        y: Tensor = _Product.apply(batch, w, bias if by_channel else None, call)  # type: ignore[no-untyped-call]
        y = y.squeeze(0) if single else y
        return y if bias is None or by_channel else y + bias, behind


def _scaling(op: BilinearOp, x: Tensor, w: Tensor, bias: Tensor | None, norm: Norm) -> Affine | None:
    """What a normalisation does to the result, if that can be done at once: where no gradient comes back."""
    library, shape = kernels.chosen(), op.output_shape(tuple(x.shape), tuple(w.shape))
    last = w.dim() == 2 and len(shape) > 2  # channels of a linear map, which are not those of the normalisation
    if library is None or last or needs_grad(x, w, bias, norm.weight, norm.bias):
        return None
    if _memory_format(x, w) != torch.contiguous_format:
        return None
    scaling = kernels.by_running(library, *norm.operands, norm.epsilon)
    return scaling if scaling is not None and scaling.of(shape[1]) else None


class _Product(torch.autograd.Function):
    """Outputs are fresh tensors: a view made in here could not be modified by an in-place ReLU behind the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        call: tuple[Runtime, Layer, BilinearOp, bool, torch.dtype, Behind, Affine | None],
    ) -> Tensor:
        (runtime, layer, op, keep, dtype, behind, scaling), saved = call, None
        finish = Finish(channel=behind.channel, bias=bias, scaling=scaling, limits=behind.limits)
        if x.numel() and w.numel():
            y, saved = runtime.forward(layer, op, x, w, dtype=dtype, keep=keep, finish=finish)
        else:
            empty = x.new_zeros(op.output_shape(tuple(x.shape), tuple(w.shape)), dtype=dtype)  # nothing to send
            y = finish.applied(empty)
        y = y.contiguous(memory_format=_memory_format(x, w))
        shape = y.shape
        y, taps = _pooled(y, behind)
        ctx.save_for_backward(*((x, w) if keep else (None, None)), None if finish.limits is None else y, taps)
        ctx.call = (runtime, layer, saved, w.dim() - 2, None if bias is None else bias.dtype)
        ctx.behind = (behind, finish, behind.window, shape)
        return y

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        runtime, layer, saved, axes, bias_dtype = ctx.call
        behind, finish, window, shape = ctx.behind
        for_x, for_w, for_bias = ctx.needs_input_grad[:3]
        x, w, y, taps = ctx.saved_tensors
        delta, sums, largest = _passed(behind, finish, delta, y, for_bias)
        passed = delta
        if window is not None:
            delta, largest = _spread(passed, taps, shape, window, largest)
        grads: dict[Pass, Tensor] = {}
        if for_x or for_w:
            wanted = {
                kind: tensor.dtype
                for kind, tensor, asked in ((Pass.GRAD_INPUT, x, for_x), (Pass.GRAD_WEIGHT, w, for_w))
                if asked
            }
            if saved is None:
                empty = {Pass.GRAD_INPUT: x, Pass.GRAD_WEIGHT: w}
                grads = {kind: torch.zeros_like(empty[kind]) for kind in wanted}
            else:
                grads = runtime.backward(layer, saved, x, delta, wanted, largest)
            if Pass.GRAD_INPUT in grads and axes:
                grads[Pass.GRAD_INPUT] = grads[Pass.GRAD_INPUT].contiguous(memory_format=_memory_format(x, w))
            if torch.is_grad_enabled():  # create_graph=True
                marked = _OnlyOnce.apply(x, w, passed, *grads.values())  # type: ignore[no-untyped-call]
                grads = dict(zip(grads, marked, strict=True))
        bias = None
        if for_bias:
            if sums is None:
                channel = finish.channel % passed.dim()
                sums = passed.sum([axis for axis in range(passed.dim()) if axis != channel])
            bias = sums.to(bias_dtype)
        return grads.get(Pass.GRAD_INPUT), grads.get(Pass.GRAD_WEIGHT), bias, None


def _passed(
    behind: Behind, finish: Finish, delta: Tensor, y: Tensor | None, summed: bool
) -> tuple[Tensor, Tensor | None, float | None]:
    """What of `delta` passes the activation that the product was finished with, its sums by channel and its magnitude.

    The last two are None unless the same pass, or an earlier one, found them. summed: the sums are needed.
    """
    told, library = behind.told(delta), kernels.chosen()
    if finish.limits is None and told is not None and (told.sums is not None or not summed):
        return delta, told.sums, told.largest
    if library is not None and not torch.is_grad_enabled() and (summed or finish.limits is not None):
        found = kernels.come_back(library, delta.contiguous(), finish.channel, y, finish.limits)
        if found is not None:
            return found.grad, found.sums, found.largest
    if y is not None and finish.limits is not None:
        low, high = finish.limits
        delta = delta.masked_fill((y <= low) | (y >= high), 0.0)
    return delta, None, None


def _pooled(y: Tensor, behind: Behind) -> tuple[Tensor, Tensor | None]:
    """With the max pooling that stands behind it, and which of its inputs were taken; without if that is torch's."""
    library, window = kernels.chosen(), behind.window
    found = None if library is None or window is None else kernels.pool(library, y, window, keep=True)
    if found is None:
        behind.window = None
        return y, None
    return found


def _spread(
    grad: Tensor, taps: Tensor, shape: torch.Size, window: Window, largest: float | None
) -> tuple[Tensor, float | None]:
    """The gradient of what was pooled, and its largest magnitude if that is the largest of `grad`."""
    library = kernels.chosen()
    assert library is not None, "it has pooled"
    spread = kernels.unpool(library, grad.detach().contiguous(), taps, shape, window)
    assert spread is not None, "it is of the form of what was pooled"
    apart = all(step >= size for step, size in zip(window.step, window.kernel, strict=True))
    return spread, largest if apart else None


class _OnlyOnce(torch.autograd.Function):
    """Gradients that are functions of x, w and delta, and refuse to be differentiated.

    torch's once_differentiable refuses only where delta itself has a graph, and is silently wrong elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, delta: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.clone() for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise ProtectError(
            "a protected layer cannot be differentiated twice (create_graph=True, gradient penalties). Keep the layers "
            "that need it in the enclave with protect_'s where."
        )


def _memory_format(x: Tensor, w: Tensor) -> torch.memory_format:
    """The layout that torch gives a convolution's result: channels last if one of the operands has it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(w.dim(), torch.contiguous_format)
    has = any(not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last) for tensor in (x, w))
    return last if has else torch.contiguous_format
