"""The library built from real.c, if this installation has it: masking with noise on a grid, and combinations of floats.

Each function says None where the library is not made for its operands, before any memory is touched; the reference does
those. Results are the reference's to the last bit, but for Gaussians and mean squares (see real.c).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite, prod

import torch
from torch import Tensor

from darknight.kernels import compiled, threads
from darknight.kernels.compiled import Function

_MOST_INPUTS = 64
_EXACT = 2.0**51  # what is rounded to an integer, and sums of fractions, stay below it
_SMALL = 1 << 31
_MOST_REPS = 32
_SLOW = 8  # a Gaussian takes as long as so many other numbers
_FEW = 8  # positions: below it, a product of matrices is faster
_POINTER, _NUMBER, _DOUBLE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int32
_TILE = 512  # numbers at a time, in real.c: where threads divide features
_POINTERS, _NUMBERS, _DOUBLES = (ctypes.POINTER(kind) for kind in (_POINTER, _NUMBER, _DOUBLE))


_RANGE = [(name, _NUMBER) for name in ("first", "last")]  # of what a thread does


class _Masking(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("x", "grid")],
        ("data", _DOUBLES),
        ("carriers", _NUMBERS),
        *[(name, _POINTER) for name in ("noise", "fractions")],
        ("outs", _POINTERS),
        *[(name, _NUMBER) for name in ("examples", "inputs", "noises", "rows", "groups", "n", "divisor")],
        *[(name, _DOUBLE) for name in ("scale", "step", "bound")],
        *[(name, _INT) for name in ("wide", "wide_outs", "within")],
        *_RANGE,
    ]


class _Unmasking(ctypes.Structure):
    _fields_ = [
        ("sources", _POINTERS),
        ("matrix", _DOUBLES),
        ("out", _POINTER),
        *[(name, _NUMBER) for name in ("count", "rows", "groups", "n", "examples")],
        *[(name, _INT) for name in ("wide", "wide_out")],
        *_RANGE,
    ]


class _Parity(ctypes.Structure):
    _fields_ = [
        ("sources", _POINTERS),
        ("weights", _DOUBLES),
        *[(name, _NUMBER) for name in ("count", "n")],
        ("tolerance", _DOUBLE),
        *[(name, _INT) for name in ("wide", "within")],
    ]


class _Measure(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("x", "sums")],
        ("largest", _DOUBLE),
        *[(name, _NUMBER) for name in ("outer", "channels", "inner")],
        ("wide", _INT),
        *_RANGE,
    ]


class _Drawing(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("words", "uniforms", "out")],
        *[(name, _NUMBER) for name in ("count", "pairs", "mean")],
        ("scale", _DOUBLE),
        ("lower", _INT),
        *_RANGE,
    ]


class _Folding(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("x", "vectors", "out")],
        *[(name, _NUMBER) for name in ("outer", "groups", "channels", "inner", "reps")],
        ("wide", _INT),
        *_RANGE,
    ]


@dataclass(frozen=True)
class Library:
    """The functions of real.c."""

    encode: Function
    decode: Function
    compare: Function
    squares: Function
    gaussian: Function
    fold: Function
    meet: Function

    @classmethod
    def loaded(cls, kind: str = "") -> Library | None:
        """None if one of them is missing. kind: "plain_" or "avx2_" for those variants."""
        found = {
            name: compiled.loaded("real", f"darknight_real_{name}_{kind}2", (_POINTER,))
            for name in (field.name for field in fields(cls))
        }
        there = {name: function for name, function in found.items() if function is not None}
        return cls(**there) if len(there) == len(found) else None


@cache
def chosen() -> Library | None:
    """The library, or None for the reference."""
    return Library.loaded() if compiled.wanted() else None


# --- masking ----------------------------------------------------------------------------------------------------------
def encode(
    library: Library,
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
) -> tuple[Tensor, bool] | None:
    """As reference_real.encode. None if it is not for these."""
    rows, inputs, noises = len(data), len(data[0]), len(noise)
    groups, shape = noise.shape[1], noise.shape[2:]
    examples = values.shape[0]
    fits = (
        _floats(values)
        and _floats(outs)
        and _whole(noise, torch.int64)
        and (fractions is None or (_whole(fractions, torch.int32) and fractions.shape == noise.shape))
        and values.shape[1:] == shape
        and outs.shape == (rows, groups, *shape)
        and len(carriers) == rows
        and 0 < inputs <= _MOST_INPUTS
        and groups == -(-examples // inputs)
        and all(len(row) == inputs for row in data)
        and all(len(row) == noises for row in carriers)
        and 0 < divisor < _SMALL
        and abs(exponent) < 1000
    )
    if not fits or not _exact(data, bound * 2.0**exponent) or not _exact(carriers, 4.0 * divisor):
        return None
    grid = torch.empty_like(values)
    if not values.numel():
        return grid, True
    what = _Masking(
        x=values.data_ptr(),
        grid=grid.data_ptr(),
        data=_doubles(data),
        carriers=(_NUMBER * (rows * noises))(*(value for row in carriers for value in row)),
        noise=noise.data_ptr(),
        fractions=None if fractions is None else fractions.data_ptr(),
        outs=_pointers(outs.unbind(0)),
        examples=examples,
        inputs=inputs,
        noises=noises,
        rows=rows,
        groups=groups,
        n=prod(shape),
        divisor=divisor,
        scale=2.0**exponent,
        step=2.0**-exponent,
        bound=bound,
        wide=values.dtype == torch.float64,
        wide_outs=outs.dtype == torch.float64,
    )
    parts = _done(library.encode, what, prod(shape), groups * prod(shape) * rows, _TILE)
    return grid, all(each.within for each in parts)


def gaussian(
    library: Library, words: Tensor, uniforms: Tensor | None, std: float, lower: int, mean: int, *, out: Tensor
) -> Tensor | None:
    """As reference_real.gaussian, within 2^-45 of a standard deviation before rounding. None if it is not for these."""
    count, pairs = out.numel(), len(words) // 2
    fits = (
        all(_whole(each, torch.int64) for each in (words, out))
        and len(words) == 2 * pairs
        and pairs == (count + 1) // 2
        and 0.0 <= std * 16.0 < _EXACT
        and 0 <= lower < 63
        and abs(mean) < 1 << 62
    )
    if lower:
        fits = fits and uniforms is not None and _whole(uniforms, torch.int64) and uniforms.numel() == count
    if not fits:
        return None
    what = _Drawing(
        words=words.data_ptr(),
        uniforms=None if uniforms is None else uniforms.data_ptr(),
        out=out.data_ptr(),
        count=count,
        pairs=pairs,
        mean=mean,
        scale=std,
        lower=lower,
    )
    _done(library.gaussian, what, pairs, _SLOW * count, _TILE)
    return out


# --- unmasking --------------------------------------------------------------------------------------------------------
def decode(
    library: Library,
    matrix: Sequence[Sequence[float]],
    sources: Sequence[Tensor],
    *,
    examples: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """As reference_real.decode. None if it is not for these."""
    rows, some = len(matrix), sources[0]
    if not _alike(sources) or dtype not in (torch.float32, torch.float64) or some.dim() < 1:
        return None
    groups, *shape = some.shape
    if not all(len(row) == len(sources) for row in matrix) or not 0 <= examples <= groups * rows:
        return None
    out = torch.empty(examples, *shape, dtype=dtype)
    what = _Unmasking(
        sources=_pointers(sources),
        matrix=_doubles(matrix),
        out=out.data_ptr(),
        count=len(sources),
        rows=rows,
        groups=groups,
        n=prod(shape),
        examples=examples,
        wide=some.dtype == torch.float64,
        wide_out=dtype == torch.float64,
    )
    _done(library.decode, what, prod(shape), out.numel(), _TILE)
    return out


def within(library: Library, weights: Sequence[float], sources: Sequence[Tensor], tolerance: float) -> bool | None:
    """As reference_real.within. None if it is not for these."""
    if not _alike(sources) or len(weights) != len(sources) or not all(weights):
        return None  # a source without weight would not be looked at
    what = _Parity(
        sources=_pointers(sources),
        weights=_doubles([weights]),
        count=len(sources),
        n=sources[0].numel(),
        tolerance=tolerance,
        wide=sources[0].dtype == torch.float64,
    )
    size, count = sources[0].element_size(), sources[0].numel()

    def some(first: int, last: int) -> bool:
        places = (_POINTER * len(sources))(*(each.data_ptr() + size * first for each in sources))
        mine = threads.part(what, last - first == count, sources=places, n=last - first)
        library.compare(ctypes.byref(mine))
        return bool(mine.within)

    return all(threads.split(some, count, count, _TILE))


def sizes(library: Library, values: Tensor) -> tuple[float, float] | None:
    """As reference_real.sizes. None if it is not for these."""
    if not _floats(values) or values.dim() < 2 or not values.numel():
        return None
    outer, channels, *inner = values.shape
    sums = torch.zeros(channels, dtype=torch.float64)
    what = _Measure(
        x=values.data_ptr(),
        sums=sums.data_ptr(),
        outer=outer,
        channels=channels,
        inner=prod(inner),
        wide=values.dtype == torch.float64,
    )
    parts = _done(library.squares, what, channels, values.numel())
    return max(each.largest for each in parts), float(sums.max()) / (outer * prod(inner))


# --- weighed sums -----------------------------------------------------------------------------------------------------
def fold(library: Library, values: Tensor, vectors: Tensor, groups: int) -> Tensor | None:
    """(row, group * channel, ...) and float64 (rep, group * channel) -> float64 (row, group * rep, ...).

    Sums over each group's channels, in float64. None if it is not for these.
    """
    if not _floats(values) or not _whole(vectors, torch.float64) or values.dim() < 3 or vectors.dim() != 2:
        return None
    (outer, channels, *inner), (reps, length) = values.shape, vectors.shape
    if length != channels or groups < 1 or channels % groups or not 0 < reps <= _MOST_REPS or prod(inner) < _FEW:
        return None
    out = torch.empty(outer, groups * reps, *inner, dtype=torch.float64)
    _done(library.fold, _folding(values, vectors, out, groups, reps), outer, values.numel())
    return out


def meet(library: Library, values: Tensor, folded: Tensor, groups: int) -> Tensor | None:
    """(row, group * channel, ...) and float64 (row, group * rep, ...) -> float64 (rep, group * channel).

    Sums over rows and positions of their products, in float64. None if it is not for these.
    """
    if not _floats(values) or not _whole(folded, torch.float64) or values.dim() < 3 or folded.dim() < 3:
        return None
    (outer, channels, *inner), (rows, repeated, *positions) = values.shape, folded.shape
    fits = outer == rows and inner == positions and prod(inner) >= _FEW
    if not fits or groups < 1 or channels % groups or repeated % groups or not repeated:
        return None
    reps = repeated // groups
    out = torch.zeros(groups, reps, channels // groups, dtype=torch.float64)
    _done(library.meet, _folding(values, folded, out, groups, reps), channels // groups, values.numel())
    return out.transpose(0, 1).reshape(reps, channels)


def _folding(values: Tensor, other: Tensor, out: Tensor, groups: int, reps: int) -> _Folding:
    outer, channels, *inner = values.shape
    return _Folding(
        x=values.data_ptr(),
        vectors=other.data_ptr(),
        out=out.data_ptr(),
        outer=outer,
        groups=groups,
        channels=channels // groups,
        inner=prod(inner),
        reps=reps,
        wide=values.dtype == torch.float64,
    )


def _done(
    function: Function, what: threads.Structure, length: int, numbers: int, step: int = 1
) -> list[threads.Structure]:
    """What was handed over, part by part of [0, length), with what the library wrote there."""

    def some(first: int, last: int) -> threads.Structure:
        mine = threads.part(what, last - first == length, first=first, last=last)
        function(ctypes.byref(mine))
        return mine

    return threads.split(some, length, numbers, step)


# --- operands ---------------------------------------------------------------------------------------------------------
def _whole(tensor: Tensor, dtype: torch.dtype) -> bool:
    kind = tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return kind and tensor.is_contiguous()


def _floats(tensor: Tensor) -> bool:
    return _whole(tensor, torch.float32) or _whole(tensor, torch.float64)


def _alike(sources: Sequence[Tensor]) -> bool:
    first = sources[0]
    return _floats(first) and all(_whole(each, first.dtype) and each.shape == first.shape for each in sources)


def _exact(rows: Sequence[Sequence[float]], largest: float) -> bool:
    """Whether combinations of numbers up to `largest` can be rounded to integers."""
    return all(isfinite(value) for row in rows for value in row) and all(
        sum(abs(float(value)) for value in row) * largest < _EXACT for row in rows
    )


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _doubles(rows: Sequence[Sequence[float]]) -> ctypes.Array[ctypes.c_double]:
    flat = [float(value) for row in rows for value in row]
    return (_DOUBLE * len(flat))(*flat)
