"""The same products without workers: `dk.Runtime(scheme, None)`."""

from __future__ import annotations

import torch
from torch import Tensor

from darknight.coding import Finish
from darknight.errors import RangeError
from darknight.ops import BilinearOp
from darknight.runtime.layer import Layer, Saved, SentWeights
from darknight.runtime.operand import Operand, Product
from darknight.types import Pass


class FieldAlone:
    """Integer products in the enclave. What would wrap around the prime raises RangeError, as it does with workers."""

    def __init__(self, prime: int) -> None:
        self._prime = prime

    def forward(
        self,
        layer: Layer,
        op: BilinearOp,
        x: Operand,
        weights: SentWeights,
        keep: bool,
        *,
        further: bool,
        finish: Finish | None = None,
    ) -> tuple[Product, Saved]:
        y = op.forward(x.integers.to(torch.float64), weights.tensor.to(torch.float64))
        product = Product(self._in_range(y, Pass.FORWARD), x.exponent + weights.exponent)
        return product, Saved(call=0, x_shape=x.shape, weights=weights)

    def backward(
        self, layer: Layer, saved: Saved, x: Operand, delta: Operand, passes: tuple[Pass, ...], *, further: bool
    ) -> dict[Pass, Product]:
        w = saved.weights.tensor.to(torch.float64)
        op, wide = saved.weights.op, delta.integers.to(torch.float64)
        results = {}
        if Pass.GRAD_INPUT in passes:
            gx = self._in_range(op.grad_input(wide, w, saved.x_shape), Pass.GRAD_INPUT)
            results[Pass.GRAD_INPUT] = Product(gx, delta.exponent + saved.weights.exponent)
        if Pass.GRAD_WEIGHT in passes:
            gw = op.grad_weight(x.integers.to(torch.float64), wide, tuple(w.shape))
            results[Pass.GRAD_WEIGHT] = Product(self._in_range(gw, Pass.GRAD_WEIGHT), delta.exponent + x.exponent)
        return results

    def _in_range(self, values: Tensor, kind: Pass) -> Tensor:
        """Integers below 2^53 are exact in float64; those beyond are far out of range anyway."""
        if values.numel() and float(values.abs().amax()) > self._prime // 2:
            raise RangeError(f"{kind.value}: the result exceeds the field's range.", kind=kind.value, check="range")
        return values.to(torch.int32)


class RealAlone:
    """Float64 products in the enclave."""

    def forward(
        self, layer: Layer, op: BilinearOp, x: Tensor, weights: SentWeights, keep: bool
    ) -> tuple[Tensor, Saved]:
        values = x.to(torch.float64)
        saved = Saved(call=0, x_shape=tuple(x.shape), weights=weights, values=values if keep else None)
        return op.forward(values, weights.tensor.to(torch.float64)), saved

    def backward(self, layer: Layer, saved: Saved, delta: Tensor, passes: tuple[Pass, ...]) -> dict[Pass, Tensor]:
        w = saved.weights.tensor.to(torch.float64)
        op, wide = saved.weights.op, delta.to(torch.float64)
        results = {}
        if Pass.GRAD_INPUT in passes:
            results[Pass.GRAD_INPUT] = op.grad_input(wide, w, saved.x_shape)
        if Pass.GRAD_WEIGHT in passes:
            assert saved.values is not None
            results[Pass.GRAD_WEIGHT] = op.grad_weight(saved.values, wide, tuple(w.shape))
        return results
