"""A layer call in real arithmetic: the products, in float64, and their dtypes."""

from __future__ import annotations

from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from darknight.coding import Finish, Real
from darknight.coding.fixed_point import largest_magnitude
from darknight.ops import BilinearOp
from darknight.runtime.layer import Layer, NewWeights, Saved, SentWeights
from darknight.types import Pass


class Products(Protocol):
    """The three passes on floats, in float64 or rounded to float32. Results are verified."""

    def forward(
        self, layer: Layer, op: BilinearOp, x: Tensor, weights: SentWeights, keep: bool
    ) -> tuple[Tensor, Saved]: ...

    def backward(self, layer: Layer, saved: Saved, delta: Tensor, passes: tuple[Pass, ...]) -> dict[Pass, Tensor]: ...


class RealCalls:
    """Layer calls in floats."""

    def __init__(self, arithmetic: Real, products: Products) -> None:
        self._dtype = arithmetic.dtype
        self._products = products

    def weights(self, op: BilinearOp, w: Tensor, known: SentWeights | None, *, keep: bool) -> NewWeights:
        """The weights as workers get them. keep: together with `known`, those before."""
        sent = w.to(self._dtype, copy=True)
        largest_magnitude(sent)  # refuses what is not finite, or is no longer
        return NewWeights(sent, 0, earlier=known.tensor if known is not None and keep else None)

    def are_still(self, weights: SentWeights, w: Tensor) -> bool:
        """Whether `weights` would come out of w."""
        return torch.equal(weights.tensor, w.to(self._dtype))

    def forward(
        self,
        layer: Layer,
        op: BilinearOp,
        x: Tensor,
        weights: SentWeights,
        dtype: torch.dtype,
        keep: bool,
        finish: Finish | None = None,
    ) -> tuple[Tensor, Saved]:
        largest_magnitude(x)
        y, saved = self._products.forward(layer, op, x, weights, keep)
        result = _fresh(y, dtype)
        return result if finish is None else finish.applied(result), saved

    def backward(
        self,
        layer: Layer,
        saved: Saved,
        x: Tensor,
        delta: Tensor,
        passes: tuple[Pass, ...],
        dtypes: dict[Pass, torch.dtype],
        known: float | None = None,
    ) -> dict[Pass, Tensor]:
        if known is None or not isfinite(known):
            largest_magnitude(delta)
        results = self._products.backward(layer, saved, delta, passes)
        return {kind: _fresh(results[kind], dtypes[kind]) for kind in passes}


def _fresh(result: Tensor, dtype: torch.dtype) -> Tensor:
    """No view: what changes it in place, such as a ReLU behind it, could not be undone."""
    return result.to(dtype, copy=result._is_view())
