"""The same products without workers: `dk.Runtime(scheme, None)`."""

from __future__ import annotations

import torch
from torch import Tensor

from darknight.errors import RangeError
from darknight.ops import BilinearOp
from darknight.runtime.layer import Layer, Saved, SentWeights
from darknight.types import Pass


class FieldAlone:
    """Integer products in the enclave. What would wrap around the prime raises RangeError, as it does with workers."""

    def __init__(self, prime: int) -> None:
        self._prime = prime

    def forward(
        self, layer: Layer, op: BilinearOp, x: Tensor, weights: SentWeights, keep: bool, *, further: bool
    ) -> tuple[Tensor, Saved]:
        y = op.forward(x.to(torch.float64), weights.tensor.to(torch.float64))
        return self._in_range(y, Pass.FORWARD), Saved(call=0, x_shape=tuple(x.shape), weights=weights)

    def backward(
        self, layer: Layer, saved: Saved, x: Tensor, delta: Tensor, passes: tuple[Pass, ...], *, further: bool
    ) -> dict[Pass, Tensor]:
        w = saved.weights.tensor.to(torch.float64)
        op, wide = saved.weights.op, delta.to(torch.float64)
        results = {}
        if Pass.GRAD_INPUT in passes:
            gx = op.grad_input(wide, w, saved.x_shape)
            results[Pass.GRAD_INPUT] = self._in_range(gx, Pass.GRAD_INPUT)
        if Pass.GRAD_WEIGHT in passes:
            gw = op.grad_weight(x.to(torch.float64), wide, tuple(w.shape))
            results[Pass.GRAD_WEIGHT] = self._in_range(gw, Pass.GRAD_WEIGHT)
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
