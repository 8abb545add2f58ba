"""Both sides of Freivalds' check in one call of the library built from residues.c (sides.h), if there is one.

`of_planes` and `grad_weight` return bit m where the sides differ modulo the prime m, so 0 for a right result;
None where the library is not made for the operands, before any memory is touched. Then sums are made one by one, to
the same end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from darknight.kernels import compiled, threads
from darknight.kernels.compiled import Function
from darknight.kernels.compiled_residues import EXPONENTS, TALLEST, WIDEST, array_of, structure, suit

_Sides = structure(
    "sides",
    "*x *values factor rows row_stride channels height width *delta delta_stride outputs inputs tall wide *weights "
    "step_down step_across hole_down hole_across zeros_above zeros_left *sums ended_height ended_width *u *v *down "
    "*across reps longest often along *primes moduli at_once",
)
_IN_CACHE = 1 << 18  # residues that are read several times

Grid = tuple[int, ...]  # steps, holes and zeros before, each down and across
Result = tuple[Tensor, Sequence[Tensor]]  # of the result: its sums, and the vectors over its positions or taps


@dataclass(frozen=True)
class Library:
    """The functions of sides.h."""

    forward: Function
    grad_input: Function
    grad_weight: Function

    @classmethod
    def loaded(cls) -> Library | None:
        """None if one of them is missing."""
        found = {
            name: compiled.loaded("residues", f"darknight_{name}_sides_1", (ctypes.c_void_p,), ctypes.c_int64)
            for name in ("forward", "grad_input", "grad_weight")
        }
        there = {name: function for name, function in found.items() if function is not None}
        return cls(**there) if len(there) == len(found) else None


@cache
def chosen() -> Library | None:
    """The library, or None for sums one by one."""
    return Library.loaded() if compiled.wanted() else None


@dataclass(eq=False, kw_only=True, slots=True)
class Weights:
    """u (rep, channel) and v (rep, row; for a weight gradient, input channel), and of how many numbers half a prime
    large each of them, and those over positions or taps, can be summed before a reduction.
    """

    u: Tensor
    v: Tensor
    longest: int
    often: int
    along: int
    primes: tuple[int, ...]


def of_planes(
    function: Function,
    result: Result,
    x: Tensor,
    exponent: int | None,
    w: Tensor,
    grid: Grid,
    weights: Weights,
    *,
    inputs: bool,
) -> int | None:
    """Of `forward`, and of `grad_input`, whose operand x is delta.

    inputs: x has the weights' input channels, not their outputs. exponent: x is float32, and round(x * 2^exponent).
    """
    sums, positions = result
    channels, summed = (w.shape[1], w.shape[0]) if inputs else (w.shape[0], w.shape[1])
    place, height, width = _planes(x, exponent)
    tall, wide = _sides_of(w.shape[2:])
    if place is None or not threads.one_is_enough(x.numel()) or width > WIDEST or tall > TALLEST:
        return None
    rows, reps = x.shape[0], weights.u.shape[0]
    if x.shape[1] != channels or not _plain(torch.int32, w) or not _fit(sums, positions, weights, summed, rows):
        return None
    down, across = _addresses(positions, reps)
    what = _Sides(
        *place,
        2.0 ** (exponent or 0),
        rows,
        x.stride(0),
        channels,
        height,
        width,
        None,
        0,
        w.shape[0],
        w.shape[1],
        tall,
        wide,
        w.data_ptr(),
        *grid,
        sums.data_ptr(),
        *_sides_of(sums.shape[2:]),
        weights.u.data_ptr(),
        weights.v.data_ptr(),
        down,
        across,
        reps,
        weights.longest,
        weights.often,
        weights.along,
        array_of(weights.primes),
        len(weights.primes),
        0,
    )
    return _done(function, what)


def grad_weight(
    function: Function,
    result: Result,
    x: Tensor,
    exponent: int | None,
    delta: Tensor,
    grid: Grid,
    weights: Weights,
) -> int | None:
    """Of `grad_weight`, with the sums of the result over its output channels."""
    sums, taps = result
    place, height, width = _planes(x, exponent)
    other, ended_height, ended_width = _planes(delta, None)
    rows, reps, moduli = x.shape[0], weights.u.shape[0], len(weights.primes)
    if place is None or other is None or rows != delta.shape[0]:
        return None
    if not threads.one_is_enough(max(x.numel(), delta.numel())) or sums.shape[2] != x.shape[1]:
        return None
    if not _fit(sums, taps, weights, delta.shape[1], x.shape[1]):
        return None
    down, across = _addresses(taps, reps)
    several = max(1, _IN_CACHE // (moduli * reps * max(height * width, ended_height * ended_width)))
    what = _Sides(
        *place,
        2.0 ** (exponent or 0),
        rows,
        x.stride(0),
        x.shape[1],
        height,
        width,
        delta.data_ptr(),
        delta.stride(0),
        delta.shape[1],
        x.shape[1],
        *_sides_of(sums.shape[3:]),
        None,
        *grid,
        sums.data_ptr(),
        ended_height,
        ended_width,
        weights.u.data_ptr(),
        weights.v.data_ptr(),
        down,
        across,
        reps,
        weights.longest,
        weights.often,
        weights.along,
        array_of(weights.primes),
        moduli,
        min(rows, several),
    )
    return _done(function, what)


def _done(function: Function, what: ctypes.Structure) -> int | None:
    differ: int = function(ctypes.byref(what))
    return None if differ < 0 else differ


def _planes(x: Tensor, exponent: int | None) -> tuple[tuple[int | None, int | None] | None, int, int]:
    """Where (row, channel, height, width), or (row, channel), is: as integers or as floats. None if it is not so."""
    height, width = _sides_of(x.shape[2:])
    if exponent is not None and abs(exponent) > EXPONENTS:
        return None, height, width
    fits = x.dim() in (2, 4) and x.numel() > 0
    if not fits or not suit(torch.int32 if exponent is None else torch.float32, x):
        return None, height, width
    if not (x.is_contiguous() or x[0].is_contiguous()):
        return None, height, width
    place = x.data_ptr()
    return ((place, None) if exponent is None else (None, place)), height, width


def _fit(sums: Tensor, vectors: Sequence[Tensor], weights: Weights, channels: int, others: int) -> bool:
    """Whether the vectors are for these sums, and for so many channels of the result and rows or inputs beside them."""
    u, v, shape, reps = weights.u, weights.v, sums.shape, weights.u.shape[0]
    if u.shape != (reps, channels) or v.shape != (reps, others) or shape[:2] != (len(weights.primes), reps):
        return False
    if vectors and [each.shape for each in vectors] != [(reps, size) for size in shape[-2:]]:
        return False
    return _plain(torch.int32, sums) and _plain(torch.float64, u, v, *vectors)


def _sides_of(shape: Sequence[int]) -> tuple[int, int]:
    """Of planes; without axes, of one position."""
    return (shape[0], shape[1]) if shape else (1, 1)


def _plain(dtype: torch.dtype, *tensors: Tensor) -> bool:
    for each in tensors:
        if each.dtype != dtype or not each.is_cpu or each.layout != torch.strided or not each.is_contiguous():
            return False
    return True


@cache
def _ones(reps: int) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * reps)(*[1.0] * reps)


def _addresses(vectors: Sequence[Tensor], reps: int) -> tuple[int, int]:
    """Of the vectors over positions or taps; of ones, where there are none."""
    if vectors:
        return vectors[0].data_ptr(), vectors[1].data_ptr()
    single = ctypes.addressof(_ones(reps))
    return single, single
