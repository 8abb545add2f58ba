"""The library built from weights.c, if this installation has it: new weights, and all that a step needs of them."""

from __future__ import annotations

import ctypes
from functools import cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from darknight.kernels import compiled, threads
from darknight.kernels.compiled import Function
from darknight.kernels.reference import Requantised

_POINTER, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_MOST_BITS = 12  # sums of the squares of a column fit 32 bits
_EXPONENTS = 126  # 2^exponent is a normal float32
_LANES = 64  # where threads divide a row: what they write lies in lines of its own
_SIZES = {"x": 4, "known": 4, "q": 4, "narrow": 2}  # bytes of a number


class _Requantisation(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("x", "known", "q", "narrow")],
        *[(name, _NUMBER) for name in ("outer", "channels", "inner")],
        *[(name, _FLOAT) for name in ("scale", "limit")],
        *[(name, _POINTER) for name in ("rows", "columns", "room")],
    ]


def loaded(kind: str = "") -> Function | None:
    """The function of weights.c. kind: "plain_" or "avx2_" for those variants."""
    return compiled.loaded("weights", f"darknight_requantise_{kind}1", (_POINTER,), _FLOAT)


@cache
def chosen() -> Function | None:
    """The library's function, or None for the reference."""
    return loaded() if compiled.wanted() else None


def suits(values: Tensor, exponent: int, bits: int, earlier: Tensor | None) -> bool:
    """Whether `requantise` is made for these."""
    fits = _plain(values, torch.float32) and values.dim() >= 2 and values.numel() > 0
    same = earlier is None or (_plain(earlier, torch.int32) and earlier.shape == values.shape)
    return fits and same and abs(exponent) <= _EXPONENTS and 0 < bits <= _MOST_BITS


def requantise(
    function: Function, values: Tensor, exponent: int, bits: int, *, counted: bool, earlier: Tensor | None
) -> Requantised | None:
    """As reference.requantise, of operands that suit."""
    outer, channels, inner = *values.shape[:2], prod(values.shape[2:])
    integers = torch.empty(values.shape, dtype=torch.int32)
    narrow = None if earlier is None else torch.empty(values.shape, dtype=torch.int16)
    what = _Requantisation(
        values.data_ptr(),
        None if earlier is None else earlier.data_ptr(),
        integers.data_ptr(),
        None if narrow is None else narrow.data_ptr(),
        outer,
        channels,
        inner,
        2.0**exponent,
        2.0**bits,
    )
    rows = torch.zeros(outer, 2, dtype=torch.int64)

    def some(first: int, last: int, length: int) -> _Requantisation:
        """From one number to another; length: of them all."""
        if last - first == length:
            return what
        places = {name: getattr(what, name) for name in _SIZES}
        moved = {name: threads.moved(place, _SIZES[name] * first) for name, place in places.items()}
        return threads.part(what, False, **moved)

    def one_row(first: int, last: int) -> float:
        mine = some(first, last, values.numel())
        mine.outer, mine.channels, mine.inner = 1, last - first, 1
        largest: float = function(ctypes.byref(mine))
        return largest

    def some_rows(first: int, last: int) -> tuple[float, Tensor]:
        columns = threads.zeros(channels, 2, dtype=np.int64)
        room = threads.zeros(2, channels * inner, dtype=np.int32)
        mine = some(first * channels * inner, last * channels * inner, values.numel())
        mine.outer, mine.rows = last - first, rows.data_ptr() + 16 * first
        mine.columns, mine.room = columns.data_ptr(), room.data_ptr()
        largest: float = function(ctypes.byref(mine))
        return largest, columns

    moments = None
    if counted:
        largests, columns = zip(*threads.split(some_rows, outer, values.numel()), strict=True)
        for each in columns[1:]:
            columns[0].numpy()[...] += each.numpy()
        moments = (rows, columns[0])
    else:
        largests = tuple(threads.split(one_row, values.numel(), values.numel(), _LANES))
    return None if min(largests) < 0 else Requantised(integers, max(largests), moments, narrow)


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_cpu and tensor.layout == torch.strided and tensor.is_contiguous()
