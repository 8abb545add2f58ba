"""Fixed-point scales: powers of two, never sent, chosen before sending; nothing saturates."""

from __future__ import annotations

import math

from torch import Tensor

from darknight.errors import EncodingError
from darknight.kernels import (
    checksum,
    dequantise,
    moments,
    quantise_nearest,
    quantise_stochastic,
    requantise,
    unchanged,
)
from darknight.kernels import largest_magnitude as _largest
from darknight.kernels import survey as _survey

__all__ = [
    "checksum",
    "dequantise",
    "exponent_for",
    "largest_magnitude",
    "moments",
    "quantise_nearest",
    "quantise_stochastic",
    "requantise",
    "survey",
    "unchanged",
]

_EXPONENTS = 120  # 2^+-120 fits float32


def largest_magnitude(values: Tensor) -> float:
    """max |value|; raises EncodingError when a value is NaN or infinite."""
    return _finite(_largest(values))


def survey(values: Tensor, exponent: int) -> tuple[float, tuple[Tensor, Tensor] | None]:
    """largest_magnitude of floats, and their `moments`, in one pass; no moments if they leave 2^12 at this scale."""
    largest, found = _survey(values, exponent)
    return _finite(largest), found


def _finite(largest: float) -> float:
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
