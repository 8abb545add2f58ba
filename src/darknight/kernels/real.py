"""Real arithmetic by the compiled library where there is one, else by the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from darknight.kernels import compiled_real, reference_real
from darknight.kernels.compiled_real import chosen


def encode(
    values: Tensor,
    exponent: int,
    bound: float,
    data: Sequence[Sequence[float]],
    carriers: Sequence[Sequence[int]],
    noise: Tensor,
    fractions: Tensor | None,
    divisor: int,
    *,
    outs: Tensor,
) -> tuple[Tensor, bool]:
    """As reference_real.encode, which says what it is."""
    library, found = chosen(), None
    if library is not None:
        found = compiled_real.encode(
            library, values, exponent, bound, data, carriers, noise, fractions, divisor, outs=outs
        )
    if found is None:
        found = reference_real.encode(values, exponent, bound, data, carriers, noise, fractions, divisor, outs=outs)
    return found


def decode(
    matrix: Sequence[Sequence[float]], sources: Sequence[Tensor], *, examples: int, dtype: torch.dtype
) -> Tensor:
    """As reference_real.decode."""
    library = chosen()
    found = None
    if library is not None:
        found = compiled_real.decode(library, matrix, sources, examples=examples, dtype=dtype)
    return reference_real.decode(matrix, sources, examples=examples, dtype=dtype) if found is None else found


def within(weights: Sequence[float], sources: Sequence[Tensor], tolerance: float) -> bool:
    """As reference_real.within."""
    library = chosen()
    found = None if library is None else compiled_real.within(library, weights, sources, tolerance)
    return reference_real.within(weights, sources, tolerance) if found is None else found


def sizes(values: Tensor) -> tuple[float, float]:
    """As reference_real.sizes, up to the last bits."""
    library = chosen()
    found = None if library is None else compiled_real.sizes(library, values)
    return reference_real.sizes(values) if found is None else found


def gaussian(words: Tensor, uniforms: Tensor | None, std: float, lower: int, mean: int, *, out: Tensor) -> Tensor:
    """As reference_real.gaussian, within 2^-45 of a standard deviation before rounding."""
    library = chosen()
    found = None if library is None else compiled_real.gaussian(library, words, uniforms, std, lower, mean, out=out)
    return reference_real.gaussian(words, uniforms, std, lower, mean, out=out) if found is None else found


# --- weighed sums: without the library, the op does them --------------------------------------------------------------
def fold(values: Tensor, vectors: Tensor, groups: int) -> Tensor | None:
    """As compiled_real.fold."""
    library = chosen()
    return None if library is None else compiled_real.fold(library, values, vectors, groups)


def meet(values: Tensor, folded: Tensor, groups: int) -> Tensor | None:
    """As compiled_real.meet."""
    library = chosen()
    return None if library is None else compiled_real.meet(library, values, folded, groups)
