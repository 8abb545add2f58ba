"""The library built from residues.c, if this installation has it.

What is handed over was checked by `residues`. Each function says None where the library is not made for its operands,
before any memory is touched; the reference does those. Results are the reference's to the last bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from darknight.kernels import compiled, threads
from darknight.kernels.compiled import Function

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
EXPONENTS = 90  # beyond, a scale could leave float32
WIDEST, TALLEST = 1024, 8  # positions side by side, and taps along the other axis, that are projected
_SEVERAL, _LANES = 8, 16  # threads divide so many outer ones; else positions, at multiples of a vector
_FEWER = 8  # so many times smaller are results that are put together from parts


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """As in residues.c: what begins with a star is a pointer, everything else a number, but for the factor."""
    types = {"*": _POINTER, "f": ctypes.c_double}
    kinds = [(each.lstrip("*"), types.get(each[0], _NUMBER)) for each in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": kinds})


_Weighing = structure(
    "weighing",
    "*x *values factor outer outer_stride groups length stride columns *v reps period longest *primes moduli *rows "
    "often *out",
)
_Folding = structure("folding", "*x moduli reps outer n inner *matrix m often *primes *out")
_Sliding = structure(
    "sliding",
    "*x moduli rows channels before size inner *weights taps step hole skipped count often *primes *out",
)
_Projecting = structure(
    "projecting",
    "*x *values factor rows row_stride channels height width *v reps longest *down *across tall wide often *primes "
    "moduli *out",
)
_Product = structure("product", "*left *right moduli rows channels n *primes *out")


@dataclass(frozen=True)
class Library:
    """The functions of residues.c."""

    weigh: Function
    fold: Function
    slide: Function
    dot: Function
    project: Function

    @classmethod
    def loaded(cls, kind: str = "") -> Library | None:
        """None if one of them is missing. kind: "plain_" for those without vector instructions of this processor."""
        found = {
            name: compiled.loaded("residues", f"darknight_{name}_{kind}3", (ctypes.c_void_p,))
            for name in ("weigh", "fold", "slide", "dot", "project")
        }
        there = {name: function for name, function in found.items() if function is not None}
        return cls(**there) if len(there) == len(found) else None


@cache
def chosen() -> Library | None:
    """The library, or None for the reference."""
    return Library.loaded() if compiled.wanted() else None


@cache
def drawing() -> Function | None:
    """The function, or None for the reference."""
    numbers = (ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    signature = (ctypes.c_void_p, *numbers, ctypes.c_void_p)
    return compiled.loaded("residues", "darknight_entries_1", signature) if compiled.wanted() else None


def entries(
    function: Function, words: Tensor, reps: int, lengths: tuple[int, ...], bits: tuple[int, ...]
) -> list[Tensor]:
    """As reference_residues.entries. Each of them is without gaps."""
    out = torch.empty(reps * sum(lengths), dtype=torch.float64)
    function(
        words.data_ptr(),
        reps,
        len(lengths),
        ctypes.addressof(_numbers(lengths)),
        ctypes.addressof(_numbers(bits)),
        max(bits),
        out.data_ptr(),
    )
    return [out.as_strided(*place) for place in _one_behind_another(reps, lengths)]


@lru_cache(maxsize=1024)
def _one_behind_another(reps: int, lengths: tuple[int, ...]) -> list[tuple[tuple[int, int], tuple[int, int], int]]:
    """Shape, strides and begin of each (rep, length)."""
    ends = accumulate(reps * length for length in lengths)
    return [((reps, length), (length, 1), end - reps * length) for length, end in zip(lengths, ends, strict=True)]


@lru_cache(maxsize=1024)
def _numbers(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def weigh(
    library: Library,
    values: Tensor,
    vectors: Tensor,
    primes: tuple[int, ...],
    *,
    longest: int,
    groups: int,
    period: int,
    rows: Tensor | None = None,
    often: int = 0,
    exponent: int | None = None,
) -> Tensor | None:
    """As reference_residues.weigh; with `rows` as weigh_rows. exponent: as residues.weigh says."""
    if exponent is not None and abs(exponent) > EXPONENTS:
        return None
    if not suit(torch.int32 if exponent is None else torch.float32, values) or not suit(
        torch.float64, vectors, *([] if rows is None else [rows])
    ):
        return None
    (outer, length, columns), reps, moduli = values.shape, len(vectors), len(primes)
    if columns > 1 and values.stride(2) != 1:
        values = values.contiguous()
    vectors, rows = vectors.contiguous(), None if rows is None else rows.contiguous()
    shape = (moduli, outer, groups, reps, columns) if rows is None else (moduli, reps, columns)
    if not prod(shape):
        return torch.empty(shape, dtype=torch.int32)
    period = max(1, period)
    what = _Weighing(
        values.data_ptr() if exponent is None else None,
        values.data_ptr() if exponent is not None else None,
        2.0 ** (exponent or 0),
        outer,
        values.stride(0),
        groups,
        length // groups,
        values.stride(1),
        columns,
        vectors.data_ptr(),
        reps,
        period,
        longest,
        array_of(primes),
        moduli,
        None if rows is None else rows.data_ptr(),
        often,
    )

    out = torch.empty(shape, dtype=torch.int32)

    def some_columns(first: int, last: int) -> None:
        x, floats = (threads.moved(place, 4 * first) for place in (what.x, what.values))
        some = threads.part(what, last - first == columns, x=x, values=floats, columns=last - first)
        _put(library.weigh, some, out, -1, first, last)

    def some_outer(first: int, last: int) -> None:
        x, floats = (threads.moved(place, 4 * first * what.outer_stride) for place in (what.x, what.values))
        some = threads.part(what, last - first == outer, x=x, values=floats, outer=last - first, period=last - first)
        _put(library.weigh, some, out, 1, first, last)

    size = values.numel() if out.numel() * _FEWER <= values.numel() else 0
    if rows is None and period == outer and (outer >= _SEVERAL or columns <= _LANES):
        threads.split(some_outer, outer, size)
    else:
        threads.split(some_columns, columns, size, _LANES)
    return out


def _put(function: Function, what: ctypes.Structure, out: Tensor, axis: int, first: int, last: int) -> None:
    """What the library makes of this part of an operand, in its part of `out` along this axis."""
    if last - first == out.shape[axis]:
        what.out = out.data_ptr()
        function(ctypes.byref(what))
        return
    place = out.movedim(axis, 0)[first:last].movedim(0, axis)
    mine = torch.empty(place.shape, dtype=torch.int32)
    what.out = mine.data_ptr()
    function(ctypes.byref(what))
    place.numpy()[...] = mine.numpy()


def fold(library: Library, values: Tensor, matrix: Tensor, primes: tuple[int, ...], often: int) -> Tensor | None:
    """As reference_residues.fold."""
    if not suit(torch.int32, values) or not suit(torch.float64, matrix):
        return None
    values, matrix = values.contiguous(), matrix.contiguous()
    moduli, reps, outer, n, inner = values.shape
    out = torch.empty(moduli, reps, outer, matrix.shape[1], inner, dtype=torch.int32)
    if out.numel():
        sizes = (moduli, reps, outer, n, inner)
        what = _Folding(
            values.data_ptr(), *sizes, matrix.data_ptr(), matrix.shape[1], often, array_of(primes), out.data_ptr()
        )
        library.fold(ctypes.byref(what))
    return out


def slide(
    library: Library,
    values: Tensor,
    weights: Tensor,
    primes: tuple[int, ...],
    *,
    step: int,
    hole: int,
    skipped: int,
    count: int,
    often: int,
) -> Tensor | None:
    """As reference_residues.slide."""
    if not suit(torch.int32, values) or not suit(torch.float64, weights):
        return None
    values, weights = values.contiguous(), weights.contiguous()
    out = torch.empty(*values.shape[:4], count, values.shape[5], dtype=torch.int32)
    if out.numel():
        what = _Sliding(
            values.data_ptr(),
            *values.shape,
            weights.data_ptr(),
            weights.shape[1],
            step,
            hole,
            skipped,
            count,
            often,
            array_of(primes),
            out.data_ptr(),
        )
        library.slide(ctypes.byref(what))
    return out


def dot(library: Library, left: Tensor, right: Tensor, primes: tuple[int, ...]) -> Tensor | None:
    """As reference_residues.dot."""
    if not suit(torch.int32, left, right):
        return None
    left, right = left.contiguous(), right.contiguous()
    out = torch.empty(left.shape[0], left.shape[2], dtype=torch.int32)
    if out.numel():
        what = _Product(left.data_ptr(), right.data_ptr(), *left.shape, array_of(primes), out.data_ptr())
        library.dot(ctypes.byref(what))
    return out


def project(
    library: Library,
    values: Tensor,
    vectors: Tensor,
    down: Tensor,
    across: Tensor,
    primes: tuple[int, ...],
    *,
    longest: int,
    often: int,
    exponent: int | None,
) -> Tensor | None:
    """As residues.project. None if it is not for these."""
    if exponent is not None and abs(exponent) > EXPONENTS:
        return None
    rows, channels, height, width = values.shape
    small = values.numel() and width <= WIDEST and down.shape[1] <= TALLEST
    if not small or not (values.is_contiguous() or values[0].is_contiguous()):
        return None
    if not suit(torch.int32 if exponent is None else torch.float32, values):
        return None
    if not suit(torch.float64, vectors, down, across):
        return None
    vectors, down, across = vectors.contiguous(), down.contiguous(), across.contiguous()
    reps, tall, wide = vectors.shape[0], down.shape[1], across.shape[1]
    what = _Projecting(
        values.data_ptr() if exponent is None else None,
        values.data_ptr() if exponent is not None else None,
        2.0 ** (exponent or 0),
        rows,
        values.stride(0),
        channels,
        height,
        width,
        vectors.data_ptr(),
        reps,
        longest,
        down.data_ptr(),
        across.data_ptr(),
        tall,
        wide,
        often,
        array_of(primes),
        len(primes),
    )

    out = torch.empty(len(primes), reps, channels, tall, wide, dtype=torch.int32)

    def some(first: int, last: int) -> None:
        x, floats = (threads.moved(place, 4 * first * height * width) for place in (what.x, what.values))
        mine = threads.part(what, last - first == channels, x=x, values=floats, channels=last - first)
        _put(library.project, mine, out, 2, first, last)

    threads.split(some, channels, values.numel())
    return out


def suit(dtype: torch.dtype, *tensors: Tensor) -> bool:
    for each in tensors:  # noqa: SIM110 - which would take longer
        if each.dtype != dtype or not each.is_cpu or each.layout != torch.strided:
            return False
    return True


@cache
def _doubles(primes: tuple[int, ...]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(primes))(*primes)


@cache
def array_of(primes: tuple[int, ...]) -> int:
    return ctypes.addressof(_doubles(primes))
