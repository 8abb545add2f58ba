"""Counting the bilinear work of whatever torch does: multiplications and additions of products, at the aten level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


def _matrix(args: Sequence[Any], out: Tensor) -> int:
    left = args[-2]  # (add)mm, (ba)ddbmm, mv, dot: the contracted axis is the last one of the left operand
    return int(2 * out.numel() * int(left.shape[-1]))


def _convolution(args: Sequence[Any], out: Tensor) -> int:
    x, w, transposed = args[0], args[1], args[6]
    spread = x if transposed else out
    return int(2 * int(spread.shape[0]) * prod(spread.shape[2:]) * w.numel())


def _attention(args: Sequence[Any], out: Any) -> int:
    query, key, value = args[0], args[1], args[2]
    pairs = prod(query.shape[:-1]) * int(key.shape[-2])
    return int(2 * pairs * (int(query.shape[-1]) + int(value.shape[-1])))


def _recurrent(args: Sequence[Any], out: Any) -> int:
    x, from_input, from_state = args[0], args[1], args[2]
    return int(2 * int(x.shape[0]) * int(x.shape[1]) * (from_input.numel() + from_state.numel()))


def _trilinear(args: Sequence[Any], out: Tensor) -> int:
    first, weight, second = args[0], args[1], args[2]
    rows = prod(first.shape[:-2]) if first.dim() > 2 else int(first.shape[0])
    return int(
        2 * rows * weight.numel() + 2 * rows * int(weight.shape[0] if weight.dim() == 3 else 1) * second.shape[-1]
    )


def _summed_batches(args: Sequence[Any], out: Tensor) -> int:
    return int(2 * args[1].numel() * int(args[2].shape[-1]))


def _time_first(args: Sequence[Any], out: Tensor) -> int:
    return int(2 * int(out.shape[0]) * int(out.shape[1]) * args[1].numel())


def _distances(args: Sequence[Any], out: Tensor) -> int:
    return int(2 * out.numel() * (int(args[0].shape[-1]) + 2))  # the squares ride along as two more axes


FORMULAS: Mapping[object, Callable[[Sequence[Any], Any], int]] = {
    _aten.mm: _matrix,
    _aten.addmm: _matrix,
    _aten.addmm_: _matrix,
    _aten.bmm: _matrix,
    _aten.baddbmm: _matrix,
    _aten.baddbmm_: _matrix,
    _aten.mv: _matrix,
    _aten.addmv: _matrix,
    _aten.addmv_: _matrix,
    _aten.dot: _matrix,
    _aten.vdot: _matrix,
    _aten._addmm_activation: _matrix,
    _aten.addbmm: _summed_batches,
    _aten.addbmm_: _summed_batches,
    _aten.conv_tbc: _time_first,
    _aten._euclidean_dist: _distances,
    _aten.convolution: _convolution,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten._trilinear: _trilinear,
}


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the products that run inside, and their flops. Composite functions are taken apart first."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.products = 0  # also those of empty tensors, which cost nothing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None:
            with self:
                taken_apart = func.decompose(*args, **kwargs)
            if taken_apart is not NotImplemented:
                return taken_apart
        out = func(*args, **kwargs)
        if formula is not None:
            self.flops += formula(args, out)
            self.products += 1
        return out
