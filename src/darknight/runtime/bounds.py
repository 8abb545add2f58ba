"""The bound C1 of a layer's input and gradient, which scales the noise of Real arithmetic.

A bound is declared (`protect_(..., bounds=...)`), or else a power of two from the largest value seen so far. What
exceeds it doubles it from that call on, which the ledger records, because the noise scale is visible in the shares.

Guarantees: every call is compared with its bound before it is masked, and nothing is masked with noise for a smaller
    one (contract tests: tests/runtime/test_real.py::test_a_declared_bound_holds_until_it_is_broken,
    tests/runtime/test_real.py::test_strict_bounds_raise_before_anything_is_sent).
Leaks: the bounds.
"""

from __future__ import annotations

import math

from torch import Tensor

from darknight.accounting import BoundRaised, Ledger
from darknight.coding.fixed_point import largest_magnitude
from darknight.errors import EncodingError
from darknight.runtime.layer import Layer

LARGEST = 2.0**90
SMALLEST = 2.0**-89  # of a bound that nobody declared: smaller values get more noise than they need


class Bounds:
    """strict: an input that exceeds its declared bound raises EncodingError instead."""

    def __init__(self, strict: bool, ledger: Ledger) -> None:
        self._strict = strict
        self._ledger = ledger

    def of_input(self, layer: Layer, x: Tensor) -> float:
        strict = self._strict and layer.declared
        layer.input_bound = self._fitting(layer, "input", layer.input_bound, x, strict)
        return layer.input_bound

    def of_gradient(self, layer: Layer, delta: Tensor) -> float:
        layer.gradient_bound = self._fitting(layer, "gradient", layer.gradient_bound, delta, False)
        return layer.gradient_bound

    def _fitting(self, layer: Layer, what: str, bound: float | None, values: Tensor, strict: bool) -> float:
        largest = largest_magnitude(values)
        if bound is not None and largest <= bound:
            return bound
        if bound is not None and strict:
            raise EncodingError(
                f"the {what} exceeds its bound {bound:g}, and strict_bounds is on. Declare a larger bound with "
                "protect_'s bounds, or normalise the data."
            )
        if largest > LARGEST:
            raise EncodingError("values beyond 2^90 leave no room for noise. Look for the layer that produced them.")
        raised = bound or (max(SMALLEST, 2.0 ** math.frexp(largest)[1]) if largest else 1.0)
        while largest > raised:
            raised *= 2
        self._ledger.record(BoundRaised(layer=layer.label, what=what, bound=raised))
        return raised
