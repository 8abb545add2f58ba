"""Linear combinations modulo a prime and on a grid, and fixed-point rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A coefficient and a residue are both below 2^28, so a product is below 2^56 and this many of them fit an int64.
_TERMS_BETWEEN_REDUCTIONS = 64
_FLOAT32_EXPONENTS = 90


def combine(
    matrix: Sequence[Sequence[int]], sources: Sequence[Tensor], prime: int, *, out: Tensor, centred: bool
) -> Tensor:
    """out[row] = sum over source of matrix[row][source] * sources[source]  (mod prime).

    Sources are integer tensors with magnitudes below 2^28; so are the coefficients. With `centred` results lie in
    [-(prime-1)/2, (prime-1)/2], otherwise in [0, prime). Zero coefficients cost nothing, so the systematic code is
    encoded and decoded with additions alone.
    """
    half = prime // 2 if centred else 0
    for row, target in zip(matrix, out, strict=True):
        total = torch.zeros(target.shape, dtype=torch.int64)
        terms = 0
        for coefficient, source in zip(row, sources, strict=True):
            if coefficient:
                if terms == _TERMS_BETWEEN_REDUCTIONS:
                    total.remainder_(prime)
                    terms = 1
                total.add_(source, alpha=coefficient)
                terms += 1
        target.copy_(total.add_(half).remainder_(prime).sub_(half))
    return out


def combine_grid(matrix: Sequence[Sequence[float]], sources: Sequence[Tensor], *, out: Tensor) -> Tensor:
    """out[row] = sum over source of matrix[row][source] * sources[source], in out's dtype.

    Exact in int64 below 2^63, and in float64 for integers below 2^53.
    """
    for row, target in zip(matrix, out, strict=True):
        target.zero_()
        for coefficient, source in zip(row, sources, strict=True):
            if coefficient:
                target.add_(source, alpha=coefficient)
    return out


def quantise_nearest(values: Tensor, exponent: int) -> Tensor:
    """round(values * 2^exponent), ties to even, as int32."""
    return values.mul(2.0**exponent).round_().to(torch.int32)


def quantise_stochastic(values: Tensor, exponent: int, uniforms: Tensor) -> Tensor:
    """Down or up to an integer, up where u < the fraction of values * 2^exponent: unbiased for uniform u, as int32."""
    scaled = values.mul(2.0**exponent)
    lower = scaled.floor()
    return lower.add_(uniforms < scaled.sub_(lower)).to(torch.int32)


def dequantise(integers: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """integers * 2^-exponent; one rounding to float32 or float64, and one more to a narrower dtype."""
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32  # integers could leave a narrower one
    if abs(exponent) > _FLOAT32_EXPONENTS:  # the scale itself would leave float32
        wide = torch.float64
    return integers.to(wide).mul_(2.0**-exponent).to(dtype)
