"""A layer call in the field: quantise, multiply integers, and repeat at a smaller scale what left the range.

Who multiplies is somebody else's business (`Products`): workers on masked shares, or the enclave. Everything that
decides a result happens here, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from darknight.accounting import Ledger, Overflow
from darknight.coding import Field, Finish, Scheme
from darknight.coding.fixed_point import exponent_for, largest_magnitude, requantise, unchanged
from darknight.errors import EncodingError, ProtectError, RangeError
from darknight.ops import BilinearOp
from darknight.randomness import rounding_of
from darknight.runtime.layer import Layer, NewWeights, Saved, SentWeights
from darknight.runtime.operand import Operand, Product
from darknight.runtime.phases import phase
from darknight.runtime.scales import TOO_LONG, gradient_exponent, input_exponent, survey, weight_sizes
from darknight.types import Pass

T = TypeVar("T")

_CHANGED = (
    "its input is not the one that was sent any more. It was overwritten after the forward pass (a buffer that numpy "
    "shares, .data), or recomputed differently (torch.utils.checkpoint: keep preserve_rng_state=True)."
)


class Products(Protocol):
    """The three passes on integers. Results are verified; RangeError says that one left the field's range.

    further: it did, and this is another attempt. finish: for the floats, if they are made with the product.
    """

    def forward(
        self,
        layer: Layer,
        op: BilinearOp,
        x: Operand,
        weights: SentWeights,
        keep: bool,
        *,
        further: bool,
        finish: Finish | None,
    ) -> tuple[Product, Saved]: ...

    def backward(
        self, layer: Layer, saved: Saved, x: Operand, delta: Operand, passes: tuple[Pass, ...], *, further: bool
    ) -> dict[Pass, Product]: ...


class FieldCalls:
    """Layer calls in fixed-point integers modulo the prime."""

    def __init__(self, scheme: Scheme, arithmetic: Field, products: Products, seed: int, ledger: Ledger) -> None:
        self._arithmetic = arithmetic
        self._products = products
        self._seed = seed
        self._ledger = ledger
        # Without Freivalds nobody would notice that a result left the range, so it must not be able to.
        self._certain = scheme.integrity in ("parity", "off")
        self._certain_weight = scheme.integrity == "off"

    def weights(self, op: BilinearOp, w: Tensor, known: SentWeights | None, *, keep: bool) -> NewWeights:
        """The weights as workers get them. keep: together with `known`, those before, of the same form.

        Their scale depends on nothing but the weights: that of `known` is tried first, and is nearly always right.
        """
        values, bits = _wide(w), self._arithmetic.bits
        earlier = known.tensor if known is not None and keep else None
        exponent = exponent_for(largest_magnitude(values), bits) if known is None else known.exponent
        made = requantise(values, exponent, bits, counted=not self._certain, earlier=earlier)
        largest = largest_magnitude(values) if made is None else made.largest
        if made is None or exponent_for(largest, bits) != exponent:
            exponent = exponent_for(largest, bits)
            made = requantise(values, exponent, bits, counted=not self._certain, earlier=earlier)
        assert made is not None, "at the scale of their largest magnitude they have these bits"
        sizes = None if made.moments is None else weight_sizes(op, tuple(w.shape), made.moments)
        return NewWeights(made.integers, exponent, sizes, made.earlier)

    def are_still(self, weights: SentWeights, w: Tensor) -> bool:
        """Whether `weights` would come out of w."""
        largest = unchanged(_wide(w), weights.exponent, weights.tensor)
        return isfinite(largest) and exponent_for(largest, self._arithmetic.bits) == weights.exponent

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
        values = _wide(x)

        def attempt(exponent: int, further: bool) -> tuple[Tensor, Saved]:
            operand = Operand(values, exponent, found.largest)
            at_once = finish if dtype == torch.float32 else None
            y, saved = self._products.forward(layer, op, operand, weights, keep, further=further, finish=at_once)
            with phase("checksum"):
                saved.exponent, saved.largest = exponent, found.largest
                saved.checksum = operand.checksum if keep else 0
                # Of the first scale, if this is a smaller one: powers of two, and nothing else, are between them.
                saved.sizes = None if sizes is None else sizes.times(2.0 ** (exponent - first))
            with phase("decode"):
                result = y.to(dtype)
                return result if finish is None or y.finished else finish.applied(result), saved

        with phase("scale"):
            counted, bits = not self._certain, self._arithmetic.bits
            found = survey(op, values, bits, counted=counted, guess=layer.input_exponent)
            layer.input_exponent = found.exponent
            first, sizes = input_exponent(self._arithmetic, op, values, found, weights, self._certain)
        return self._repeated(layer, found.largest, first, attempt)

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
        values, op = _wide(delta), saved.weights.op
        with phase("scale"):
            counted, bits = not (self._certain and self._certain_weight), self._arithmetic.bits
            found = survey(op, values, bits, counted=counted, known=known, guess=layer.gradient_exponent)
            layer.gradient_exponent = found.exponent
        operand = Operand(_wide(x), saved.exponent, saved.largest)
        with phase("checksum"):
            changed = Pass.GRAD_WEIGHT in passes and operand.checksum != saved.checksum
        if changed:
            raise ProtectError(f"layer {layer.label}: {_CHANGED}")
        rounding = rounding_of(seed=self._seed, layer=layer.name, call=layer.gradients, kind="gradient")

        def attempt(exponent: int, further: bool) -> dict[Pass, Tensor]:
            rounded = Operand(values, exponent, found.largest, rounding)
            results = self._products.backward(layer, saved, operand, rounded, passes, further=further)
            with phase("decode"):
                return {kind: results[kind].to(dtypes[kind]) for kind in passes}

        with phase("scale"):
            exponent = gradient_exponent(
                self._arithmetic,
                op,
                values,
                found,
                operand,
                saved.sizes,
                saved.weights,
                certain_input=self._certain,
                certain_weight=self._certain_weight,
            )
        return self._repeated(layer, found.largest, exponent, attempt)

    def _repeated(self, layer: Layer, largest: float, exponent: int, attempt: Callable[[int, bool], T]) -> T:
        """`attempt` at the first scale, from `exponent` down, whose results stay in range."""
        last = exponent_for(largest, 1)  # one bit is left of the largest value
        further = False
        while exponent >= last:
            try:
                return attempt(exponent, further)
            except RangeError as error:
                self._ledger.record(Overflow(layer=layer.label, kind=Pass(error.kind)))
                exponent, further = exponent - 1, True
        raise EncodingError(TOO_LONG)


def _wide(values: Tensor) -> Tensor:
    """float32 or float64, without gaps: the narrower floats have no room for the scaling."""
    return (values if values.dtype == torch.float64 else values.to(torch.float32)).contiguous()
