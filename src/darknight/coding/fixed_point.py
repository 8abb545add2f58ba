"""Fixed-point scales: powers of two, never sent, chosen before sending; nothing saturates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from darknight.errors import EncodingError
from darknight.kernels import dequantise, quantise_nearest, quantise_stochastic

__all__ = [
    "bits_over",
    "dequantise",
    "exponent_for",
    "largest_magnitude",
    "quantise_nearest",
    "quantise_stochastic",
    "rms",
]

_EXPONENTS = 120  # 2^+-120 fits float32
_PEAK = 6.0  # peak of a sum over its standard deviation, for independent terms


def largest_magnitude(values: Tensor) -> float:
    """max |value|; raises EncodingError when a value is NaN or infinite."""
    if not values.numel():
        return 0.0
    largest = float(values.abs().amax())
    if not math.isfinite(largest):
        raise EncodingError("values that are NaN or infinite cannot be encoded. Look for the layer that produced them.")
    return largest


def exponent_for(largest: float, bits: int) -> int:
    """The exponent e for which values up to `largest`, times 2^e, fill `bits` magnitude bits."""
    if largest == 0.0:
        return 0
    exponent = bits - math.frexp(largest)[1]
    if exponent < -_EXPONENTS:
        raise EncodingError("values beyond 2^120 cannot be encoded. Look for the layer that produced them.")
    return min(_EXPONENTS, exponent)


def bits_over(left_rms: float, right_rms: float, terms: int, prime: int) -> int:
    """By how many bits a sum of `terms` products of independent values is expected to exceed the field's range.

    An estimate, which the scale is lowered by beforehand so that retries stay rare. What exceeds the range all the same
    is noticed by the check in the second field.
    """
    peak = _PEAK * left_rms * right_rms * math.sqrt(terms)
    return max(0, math.ceil(math.log2(peak / (prime // 2)))) if peak else 0


def rms(values: Tensor) -> float:
    return float(values.to(torch.float32).square().mean().sqrt()) if values.numel() else 0.0
