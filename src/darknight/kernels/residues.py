"""Weighed sums modulo primes, by the compiled library where there is one, else by the reference: the same results.

A wrong shape raises here, before any memory is touched.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from darknight.kernels import compiled_residues, reference_residues
from darknight.kernels.compiled_residues import chosen
from darknight.kernels.reference import quantise_nearest

Primes = tuple[int, ...]
_MOST_PRIMES = 2


def entries(words: Tensor, reps: int, lengths: tuple[int, ...], bits: tuple[int, ...]) -> list[Tensor]:
    """As reference_residues.entries."""
    _expect(words.dtype == torch.int32 and words.is_contiguous(), "words of 32 bits without gaps")
    _expect(words.numel() == reps * sum(lengths) and len(lengths) == len(bits), "a word for each entry")
    _expect(min(bits) >= 1 and max(bits) <= 30, "entries of 1 to 30 bits")
    function = compiled_residues.drawing() if chosen() is not None else None
    if function is None:
        return reference_residues.entries(words, reps, lengths, bits)
    return compiled_residues.entries(function, words, reps, lengths, bits)


def weigh(
    values: Tensor,
    vectors: Tensor,
    primes: Primes,
    *,
    longest: int,
    groups: int = 1,
    period: int | None = None,
    exponent: int | None = None,
) -> Tensor:
    """As reference_residues.weigh, which says what it is. exponent: float32, of which round(values * 2^exponent)."""
    together = values.shape[0] if period is None and values.dim() == 3 else period
    _expect(values.dim() == 3 and vectors.dim() == 2, "(outer, row, column) and (rep, row)")
    _expect(min(longest, groups) >= 1 and _known(primes), "counts of at least 1, and one or two primes")
    assert together is not None
    outer, rows, _ = values.shape
    _expect(rows % groups == 0 and (together == outer or (together > 0 and outer % together == 0)), "whole groups")
    _expect(vectors.shape[1] == rows * (outer // together if together else 1), "a weight for each row")
    library, found = chosen(), None
    if library is not None:
        found = compiled_residues.weigh(
            library, values, vectors, primes, longest=longest, groups=groups, period=together, exponent=exponent
        )
    if found is None:
        values = values if exponent is None else quantise_nearest(values, exponent)
        found = reference_residues.weigh(values, vectors, primes, longest=longest, groups=groups, period=together)
    return found


def weigh_rows(values: Tensor, vectors: Tensor, rows: Tensor, primes: Primes, *, longest: int, often: int) -> Tensor:
    """As reference_residues.weigh_rows."""
    _expect(values.dim() == 3 and vectors.dim() == 2 and rows.dim() == 2, "(outer, row, column) and vectors")
    _expect(min(longest, often) >= 1 and _known(primes), "counts of at least 1, and one or two primes")
    outer, length, _ = values.shape
    _expect(vectors.shape[1] == length and tuple(rows.shape) == (len(vectors), outer), "a weight for each row")
    library, found = chosen(), None
    if library is not None:
        found = compiled_residues.weigh(
            library, values, vectors, primes, longest=longest, groups=1, period=outer, rows=rows, often=often
        )
    if found is None:
        found = reference_residues.weigh_rows(values, vectors, rows, primes, longest=longest, often=often)
    return found


def project(
    values: Tensor,
    vectors: Tensor,
    down: Tensor,
    across: Tensor,
    primes: Primes,
    *,
    longest: int,
    often: int,
    exponent: int | None = None,
) -> Tensor | None:
    """(row, channel, height, width), (rep, row), (rep, tall, height), (rep, wide, width) -> (modulus, rep, channel,
    tall, wide): `weigh` over rows and `fold` along both axes, in one pass. None where nothing was compiled for these.
    """
    _expect(values.dim() == 4 and vectors.dim() == 2, "(row, channel, height, width) and (rep, row)")
    _expect(min(longest, often) >= 1 and _known(primes), "counts of at least 1, and one or two primes")
    rows, _, height, width = values.shape
    reps = len(vectors)
    _expect(vectors.shape[1] == rows, "a weight for each row")
    _expect(down.dim() == across.dim() == 3 and len(down) == len(across) == reps, "matrices for each repetition")
    _expect(down.shape[2] == height and across.shape[2] == width, "a weight for each position")
    library = chosen()
    if library is None:
        return None
    return compiled_residues.project(
        library, values, vectors, down, across, primes, longest=longest, often=often, exponent=exponent
    )


def fold(values: Tensor, matrix: Tensor, primes: Primes, *, often: int) -> Tensor:
    """As reference_residues.fold."""
    _expect(values.dim() == 5 and matrix.dim() == 3 and often >= 1, "five axes, three, and a count of at least 1")
    _expect(values.shape[0] == len(primes) and _known(primes), "one or two primes")
    _expect(matrix.shape[0] == values.shape[1] and matrix.shape[2] == values.shape[3], "a weight for each number")
    library = chosen()
    found = None if library is None else compiled_residues.fold(library, values, matrix, primes, often)
    return reference_residues.fold(values, matrix, primes, often=often) if found is None else found


def slide(
    values: Tensor,
    weights: Tensor,
    primes: Primes,
    *,
    step: int,
    hole: int,
    skipped: int,
    count: int,
    often: int,
) -> Tensor:
    """As reference_residues.slide."""
    _expect(values.dim() == 6 and weights.dim() == 2, "six axes, and two")
    _expect(min(step, hole, often) >= 1 and min(skipped, count) >= 0, "counts of at least 1")
    _expect(values.shape[0] == len(primes) and _known(primes), "one or two primes")
    _expect(weights.shape[0] == values.shape[2], "weights for each channel")
    library = chosen()
    found = None
    if library is not None:
        found = compiled_residues.slide(
            library, values, weights, primes, step=step, hole=hole, skipped=skipped, count=count, often=often
        )
    if found is None:
        found = reference_residues.slide(
            values, weights, primes, step=step, hole=hole, skipped=skipped, count=count, often=often
        )
    return found


def dot(left: Tensor, right: Tensor, primes: Primes) -> Tensor:
    """As reference_residues.dot."""
    _expect(left.dim() == 4 and left.shape == right.shape, "two of four axes")
    _expect(left.shape[0] == len(primes) and _known(primes), "one or two primes")
    library = chosen()
    found = None if library is None else compiled_residues.dot(library, left, right, primes)
    return reference_residues.dot(left, right, primes) if found is None else found


@cache
def _known(primes: Primes) -> bool:
    return 1 <= len(primes) <= _MOST_PRIMES and all(2 < prime < 1 << 28 for prime in primes)


def _expect(holds: bool, needed: str) -> None:
    if not holds:
        raise ValueError(f"residues: needs {needed}.")
