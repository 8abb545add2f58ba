"""The library built from field.c, if this installation has it: combinations modulo a prime, and fixed point.

Each function says None where the library is not made for its operands, before any memory is touched; the reference does
those. Results are the reference's to the last bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from darknight.kernels import compiled, threads
from darknight.kernels.compiled import Function
from darknight.kernels.reference import Rounding

MOST_SOURCES = 128
_MOST_ROWS = 128
_MOST_KEPT = 8  # inputs of a group that need not be written down
_FEW_PLACES, _MOST_PLACES = 64, 4096  # of words that are drawn again, beside twice as many as are likely; and in all
_POINTER, _NUMBER, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32
_INFINITE = 0x7F800000  # the bits of a float32 that is infinite; those of NaN are above
_TILE = 1024  # numbers at a time, in field.c: where threads divide a run
_CHECKSUMS = 1 << 64
_WORDS = 1 << 32
_LONG = 1 << 14  # numbers in a row whose checksum is worth a call
_NOWHERE = torch.empty(0, dtype=torch.int64)  # places of nothing; there is nothing to write to

Range = tuple[int, int]


class Combination(ctypes.Structure):
    _fields_ = [
        ("matrix", ctypes.POINTER(_INT)),
        ("low", ctypes.POINTER(_INT)),
        ("high", ctypes.POINTER(_INT)),
        ("rows", _NUMBER),
        ("sources", _NUMBER),
        ("prime", _INT),
        ("bits", _INT),
        ("less", _INT),
        ("centred", _INT),
    ]


_SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "combine": ((*(_POINTER,) * 7, _FLOAT, _NUMBER, _NUMBER, _POINTER), None),
    "encode": (
        (*(_POINTER,) * 3, *(_NUMBER,) * 2, _FLOAT, *(_POINTER,) * 3, *(_NUMBER,) * 2, _POINTER, _NUMBER),
        ctypes.c_uint64,
    ),
    "largest": ((_POINTER, _NUMBER), _INT),
    "quantise": ((_POINTER, _POINTER, _NUMBER, _FLOAT, _POINTER), None),
    "unchanged": ((_POINTER, _NUMBER, _FLOAT, _POINTER), _INT),
    "below": ((_POINTER, _NUMBER, _INT, _INT, _POINTER, _NUMBER), _NUMBER),
    "moments": ((_POINTER, _POINTER, *(_NUMBER,) * 3, _FLOAT, _POINTER, _POINTER), _INT),
    "checksum": ((_POINTER, _POINTER, _FLOAT, _NUMBER, _NUMBER, _POINTER), ctypes.c_uint64),
    "rounding": ((_POINTER, ctypes.c_uint32, _NUMBER, ctypes.c_uint32, ctypes.c_uint32), None),
}
_VERSIONS = {"combine": 2, "encode": 4, "moments": 2, "checksum": 2}  # of their interfaces; of the others, 1


@dataclass(frozen=True)
class Library:
    """The functions of field.c."""

    combine: Function
    encode: Function
    largest: Function
    quantise: Function
    unchanged: Function
    below: Function
    moments: Function
    checksum: Function
    rounding: Function

    @classmethod
    def loaded(cls, kind: str = "") -> Library | None:
        """None if one of them is missing. kind: "plain_" for those without vector instructions of this processor."""
        found = {
            name: compiled.loaded("field", f"darknight_{name}_{kind}{_VERSIONS.get(name, 1)}", *signature)
            for name, signature in _SIGNATURES.items()
        }
        there = {name: function for name, function in found.items() if function is not None}
        return cls(**there) if len(there) == len(found) else None


@cache
def chosen() -> Library | None:
    """The library, or None for the reference."""
    return Library.loaded() if compiled.wanted() else None


# --- combinations -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Form:
    """A combination as the library takes it. ranges: by source, the least and the largest of its numbers."""

    matrix: tuple[tuple[int, ...], ...]
    ranges: tuple[Range, ...]
    prime: int
    centred: bool

    def structure(self) -> Combination | None:
        return self._structure

    @cached_property
    def _structure(self) -> Combination | None:
        return _structure_of(self)


def _structure_of(form: Form) -> Combination | None:
    prime, sources = form.prime, len(form.ranges)
    bits = prime.bit_length()
    less = (1 << bits) - prime
    few = 0 < sources <= MOST_SOURCES and len(form.matrix) <= _MOST_ROWS
    reach = all(-prime <= low <= high <= prime for low, high in form.ranges)
    if not (20 <= bits <= 28 and less < 256 and reach and few):
        return None
    flat = [_around_zero(value, prime) for row in form.matrix for value in row]
    return Combination(
        (_INT * len(flat))(*flat),
        (_INT * sources)(*(low for low, _ in form.ranges)),
        (_INT * sources)(*(high for _, high in form.ranges)),
        len(form.matrix),
        sources,
        prime,
        bits,
        less,
        form.centred,
    )


def _around_zero(value: int, prime: int) -> int:
    """So that -1 is -1, and not prime - 1: small coefficients are faster."""
    return (value + prime // 2) % prime - prime // 2


def combine(
    library: Library,
    form: Form,
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    floats: Sequence[Tensor] = (),
    scale: float = 1.0,
    outside: list[int] | None = None,
) -> bool:
    """As reference.combine into `outs`, and times `scale` into `floats`, if there are any; nothing may overlap.

    outside: as in `unmask`. False if it is not for these.
    """
    structure, every = form.structure(), [*sources, *outs, *floats]
    if structure is None or len(sources) != len(form.ranges) or len(outs) != len(form.matrix):
        return False
    if any(tensor.shape != outs[0].shape for tensor in every) or (floats and len(floats) != len(outs)):
        return False
    integers = all(plain(tensor, torch.int32) for tensor in (*sources, *outs))
    layout = _runs(every)
    if not integers or not all(plain(tensor, torch.float32) for tensor in floats) or layout is None:
        return False
    blocks, length, strides = layout
    if blocks * length == 0:
        return True
    count = len(sources)
    outs_end = count + len(outs)
    whole = blocks > length // _TILE  # then threads divide the blocks, else each of these

    def some(first: int, last: int) -> list[int]:
        at = [(first * stride if whole else first) for stride in strides] if first else None
        flags = None if outside is None else (_INT * count)()
        library.combine(
            ctypes.byref(structure),
            pointers(sources, at and at[:count]),
            numbers(strides[:count]),
            pointers(outs, at and at[count:outs_end]),
            numbers(strides[count:outs_end]),
            pointers(floats, at and at[outs_end:]) if floats else None,
            numbers(strides[outs_end:]) if floats else None,
            scale,
            last - first if whole else blocks,
            length if whole else last - first,
            flags,
        )
        return [] if flags is None else [place for place, flag in enumerate(flags) if flag]

    size = blocks * length * len(outs)
    found = threads.split(some, blocks, size) if whole else threads.split(some, length, size, _TILE)
    if outside is not None:
        outside += sorted({place for each in found for place in each})
    return True


def unmask(
    library: Library,
    form: Form,
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    floats: Sequence[Tensor],
    scale: float,
) -> list[int] | None:
    """As reference.unmask, with every source read once, tile by tile. None if it is not for these."""
    outside: list[int] = []
    return outside if combine(library, form, sources, outs, floats, scale, outside) else None


def encode(
    library: Library,
    form: Form,
    values: Tensor,
    scale: float,
    rounding: Rounding | None,
    inputs: int,
    noise: Tensor,
    outs: Sequence[Tensor | None],
    quantised: Tensor | None,
    weights: Tensor | None = None,
    row: int = 0,
) -> int | None:
    """As reference.encode; the quantised values go to `quantised`, if they are wanted. None if it is not for these.

    Returns the checksum of what is rounded to nearest, as rows of it from `row` on, if there are `weights` for it: its,
    as uint32.
    """
    structure, examples = form.structure(), values.shape[0]
    groups = -(-examples // inputs)
    shape, noises = (groups, *values.shape[1:]), len(form.ranges) - inputs
    if not _whole(values, torch.float32) or not values.numel() or not isfinite(scale):
        return None
    if noise.shape != (noises, *shape) or not _whole(noise, torch.int32):
        return None
    for out in outs:
        if out is not None and not (out.shape == shape and _whole(out, torch.int32)):
            return None
    if structure is None or len(outs) != len(form.matrix) or inputs < 1:
        return None
    if quantised is None and inputs > _MOST_KEPT:
        return None
    features = values.numel() // examples

    def some(first: int, last: int) -> int:
        start, group = 4 * first * inputs * features, 4 * first * features
        keys = None if rounding is None else _keys(rounding, first * inputs * features)
        found: int = library.encode(
            ctypes.byref(structure),
            values.data_ptr() + start,
            keys,
            min(examples, last * inputs) - first * inputs,
            inputs,
            scale,
            None if quantised is None else quantised.data_ptr() + start,
            noise.data_ptr() + group,
            pointers(outs, [first * features] * len(outs) if first else None),
            last - first,
            features,
            None if weights is None else weights.data_ptr(),
            row + first * inputs,
        )
        return found

    if noises == 1:
        return sum(threads.split(some, groups, groups * features * len(outs))) % _CHECKSUMS
    return some(0, groups)  # the noise of some groups does not lie in one piece


def plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_cpu and tensor.layout == torch.strided


def _whole(tensor: Tensor, dtype: torch.dtype) -> bool:
    """plain, and without gaps."""
    return tensor.dtype == dtype and tensor.is_cpu and tensor.layout == torch.strided and tensor.is_contiguous()


def without_gaps_inside(tensor: Tensor, dtype: torch.dtype) -> bool:
    """plain, but for gaps between its first axis's. (A view of one of them takes longer to make than to ask about.)"""
    if tensor.dtype != dtype or not tensor.is_cpu or tensor.layout != torch.strided:
        return False
    return tensor.is_contiguous() or tensor[0].is_contiguous()


def _runs(tensors: Sequence[Tensor]) -> tuple[int, int, list[int]] | None:
    """How many runs of how many numbers all tensors are made of, and by tensor how far apart these begin."""
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return 1, first.numel(), [0] * len(tensors)
    if first.dim() < 1 or not first.shape[0] or not all(tensor[0].is_contiguous() for tensor in tensors):
        return None
    return first.shape[0], first[0].numel(), [tensor.stride(0) for tensor in tensors]


def pointers(tensors: Sequence[Tensor | None], starts: Sequence[int] | None = None) -> ctypes.Array[ctypes.c_void_p]:
    """Where each begins; or where its numbers do from `starts` on, of four bytes each."""
    if starts is None:
        return (_POINTER * len(tensors))(*[None if tensor is None else tensor.data_ptr() for tensor in tensors])
    places = zip(tensors, starts, strict=True)
    return (_POINTER * len(tensors))(*[None if each is None else each.data_ptr() + 4 * at for each, at in places])


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (_NUMBER * len(values))(*values)


# --- fixed point ------------------------------------------------------------------------------------------------------
def dense(values: Tensor) -> bool:
    """Float32 without gaps, in whatever order its axes are."""
    return plain(values, torch.float32) and _without_gaps(values)


def _without_gaps(values: Tensor) -> bool:
    if values.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def largest(library: Library, values: Tensor) -> float | None:
    """max |value|, infinite if one is NaN. None if it is not for these."""
    if not dense(values):
        return None

    def some(first: int, last: int) -> int:
        bits: int = library.largest(values.data_ptr() + 4 * first, last - first)
        return bits

    return _magnitude(max(threads.split(some, values.numel(), values.numel(), _TILE)))


def _magnitude(bits: int) -> float:
    """What has these bits; infinite if that is NaN."""
    return float("inf") if bits >= _INFINITE else ctypes.c_float.from_buffer(ctypes.c_int32(bits)).value


def quantise(library: Library, values: Tensor, scale: float, words: Tensor | None) -> Tensor | None:
    """As reference.quantise_nearest, or quantise_stochastic with `words`. None if it is not for these."""
    fits = values.is_contiguous() if words is not None else True
    if words is not None:
        fits = fits and plain(words, torch.int32) and words.is_contiguous() and words.shape == values.shape
    if not fits or not dense(values) or not isfinite(scale):
        return None
    quantised = torch.empty_like(values, dtype=torch.int32)  # the same strides
    if quantised.stride() != values.stride():
        return None

    def some(first: int, last: int) -> None:
        drawn = None if words is None else words.data_ptr() + 4 * first
        library.quantise(values.data_ptr() + 4 * first, drawn, last - first, scale, quantised.data_ptr() + 4 * first)

    threads.split(some, values.numel(), values.numel(), _TILE)
    return quantised


def _keys(rounding: Rounding, after: int) -> ctypes.Array[ctypes.c_uint32]:
    """As field.c's rounding_keys, of what comes after so many words."""
    return (ctypes.c_uint32 * 3)(rounding.key, rounding.other, (rounding.first + after) % _WORDS)


def rounding_words(library: Library, count: int, rounding: Rounding) -> Tensor:
    """As reference.rounding_words."""
    words = torch.empty(count, dtype=torch.int32)

    def some(first: int, last: int) -> None:
        begin = (rounding.first + first) % _WORDS
        library.rounding(words.data_ptr() + 4 * first, begin, last - first, rounding.key, rounding.other)

    threads.split(some, count, count, _TILE)
    return words


def unchanged(library: Library, values: Tensor, scale: float, quantised: Tensor) -> float | None:
    """As reference.unchanged. None if it is not for these."""
    same_form = values.shape == quantised.shape and values.stride() == quantised.stride()
    if not same_form or not dense(values) or not plain(quantised, torch.int32) or not isfinite(scale):
        return None

    def some(first: int, last: int) -> int:
        at = 4 * first
        bits: int = library.unchanged(values.data_ptr() + at, last - first, scale, quantised.data_ptr() + at)
        return bits

    found = threads.split(some, values.numel(), values.numel(), _TILE)
    return float("inf") if min(found) < 0 else _magnitude(max(found))


def below(library: Library, words: Tensor, mask: int, last: int) -> Tensor | None:
    """Cuts int32 words to `mask` in place; the places of those above `last`. None if it is not for these."""
    if not plain(words, torch.int32) or not words.is_contiguous() or not 0 <= last <= mask < 1 << 31:
        return None

    def some(start: int, end: int) -> list[int] | None:
        likely = (end - start) * (mask - last) // (mask + 1)
        room = min(_MOST_PLACES, _FEW_PLACES + 2 * likely)
        places = (_NUMBER * room)()
        count: int = library.below(words.data_ptr() + 4 * start, end - start, mask, last, places, room)
        return None if count > room else [start + place for place in places[:count]]

    found: list[int] = []
    for each in threads.split(some, words.numel(), words.numel(), _TILE):
        if each is None:
            return (words.view(-1) > last).nonzero().squeeze(1)
        found += each
    return torch.tensor(found, dtype=torch.int64) if found else _NOWHERE


# --- sums over what was quantised -------------------------------------------------------------------------------------
def moments(library: Library, values: Tensor, scale: float) -> tuple[float, tuple[Tensor, Tensor]] | None:
    """reference.moments, behind the largest magnitude of floats, which are read once. None if it is not for these.

    Of floats beyond 2^12 at this scale, or NaN, the moments mean nothing.
    """
    floats, integers = plain(values, torch.float32), plain(values, torch.int32)
    if not (floats or integers) or values.dim() != 3 or not values.is_contiguous() or not isfinite(scale):
        return None
    outer, channels, inner = values.shape
    rows = torch.zeros(outer, 2, dtype=torch.int64)

    def some(first: int, last: int) -> tuple[int, Tensor]:
        columns = threads.zeros(channels, 2, dtype=np.int64)
        place = values.data_ptr() + 4 * first * channels * inner
        bits: int = library.moments(
            place if floats else None,
            place if integers else None,
            last - first,
            channels,
            inner,
            scale,
            rows.data_ptr() + 16 * first,
            columns.data_ptr(),
        )
        return bits, columns

    found = threads.split(some, outer, values.numel())
    columns = found[0][1]
    for _, each in found[1:]:
        columns.numpy()[...] += each.numpy()
    return _magnitude(max(bits for bits, _ in found)), (rows, columns)


def checksum(library: Library, values: Tensor, exponent: int | None, weights: Tensor) -> int | None:
    """As reference.checksum, of integers or of floats; weights: its, as uint32. None if it is not for these."""
    dtype = torch.int32 if exponent is None else torch.float32
    if not plain(values, dtype) or not values.is_contiguous() or not values.numel():
        return None
    scale, rows = 2.0 ** (exponent or 0), values.shape[0]
    length = values.numel() // rows
    if not isfinite(scale):
        return None

    def of(first: int, count: int) -> int:
        place = values.data_ptr() + 4 * first * length
        integers, floats = (place, None) if exponent is None else (None, place)
        found: int = library.checksum(integers, floats, scale, count, length, weights.data_ptr())
        return found

    def some(first: int, last: int) -> int:
        if (first, last) == (0, rows):
            return of(0, rows)
        return sum((2 * row + 1) * of(row, 1) for row in range(first, last))  # its sum, times what its place says

    return sum(threads.split(some, rows, values.numel() if length >= _LONG else 0)) % _CHECKSUMS
