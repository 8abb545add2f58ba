"""A protected product in the autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from darknight.errors import OpError, ProtectError
from darknight.ops import BilinearOp
from darknight.runtime import Layer, Runtime, Saved
from darknight.types import Pass


def product(runtime: Runtime, layer: Layer, op: BilinearOp, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """<w, x> + bias, with <w, x> and its gradients computed through `runtime`.

    x has its examples along the first axis, or is a single example without that axis.
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
    with torch._C.DisableTorchFunction():  # what happens inside is no concern of an active function mode
        y: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            batch, w, bias if by_channel else None, runtime, layer, op, keep, dtype
        )
        y = y.squeeze(0) if single else y
        return y if bias is None or by_channel else y + bias


class _Product(torch.autograd.Function):
    """Outputs are fresh tensors: a view made in here could not be modified by an in-place ReLU behind the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        runtime: Runtime,
        layer: Layer,
        op: BilinearOp,
        keep: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        saved: Saved | None = None
        if x.numel() and w.numel():
            y, saved = runtime.forward(layer, op, x, w, dtype=dtype, keep=keep)
        else:
            y = x.new_zeros(op.output_shape(tuple(x.shape), tuple(w.shape)), dtype=dtype)  # nothing to send
        if bias is not None:
            y += bias.reshape(-1, *[1] * (w.dim() - 2)).to(dtype)
        if keep:
            ctx.save_for_backward(x, w)
        ctx.call = (runtime, layer, saved, w.dim() - 2, None if bias is None else bias.dtype)
        return y.contiguous(memory_format=_memory_format(x, w))

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        runtime, layer, saved, axes, bias_dtype = ctx.call
        for_x, for_w, for_bias = ctx.needs_input_grad[:3]
        grads: dict[Pass, Tensor] = {}
        if for_x or for_w:
            x, w = ctx.saved_tensors
            wanted = {
                kind: tensor.dtype
                for kind, tensor, asked in ((Pass.GRAD_INPUT, x, for_x), (Pass.GRAD_WEIGHT, w, for_w))
                if asked
            }
            if saved is None:
                empty = {Pass.GRAD_INPUT: x, Pass.GRAD_WEIGHT: w}
                grads = {kind: torch.zeros_like(empty[kind]) for kind in wanted}
            else:
                grads = runtime.backward(layer, saved, x, delta, wanted)
            if Pass.GRAD_INPUT in grads and axes:
                grads[Pass.GRAD_INPUT] = grads[Pass.GRAD_INPUT].contiguous(memory_format=_memory_format(x, w))
            if torch.is_grad_enabled():  # create_graph=True
                marked = _OnlyOnce.apply(x, w, delta, *grads.values())  # type: ignore[no-untyped-call]
                grads = dict(zip(grads, marked, strict=True))
        bias = None
        if for_bias:
            channel = 1 if axes else delta.dim() - 1
            bias = delta.sum([axis for axis in range(delta.dim()) if axis != channel]).to(bias_dtype)
        return grads.get(Pass.GRAD_INPUT), grads.get(Pass.GRAD_WEIGHT), bias, *[None] * 5


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
