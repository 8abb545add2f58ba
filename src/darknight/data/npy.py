"""The header of a NumPy array in a file: its dtype, its order, its shape. Objects are refused, so nothing is unpickled.

NumPy evaluates the header as Python; here it must match one pattern, which is all that NumPy and others write.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from darknight.errors import DataError

_MAGIC = b"\x93NUMPY"
_LONGEST = 4096
_PATTERN = re.compile(
    r"\{(?:(?:'descr':'(?P<descr>[<>|=]?[a-zA-Z]\d*)'|'fortran_order':(?P<order>True|False)|'shape':\((?P<shape>[\dL,]*)\)),?){3}\}"
)
_SIDES = re.compile(r"(?:\d{1,18}L?,)*(?:\d{1,18}L?)?")
# Bytes, floats, integers: what becomes pixels, columns and labels.
_DTYPES = {
    f"{kind}{size}" for kind, sizes in {"u": (1, 2, 4, 8), "i": (1, 2, 4, 8), "f": (2, 4, 8)}.items() for size in sizes
}


@dataclass(frozen=True)
class NpyHeader:
    dtype: np.dtype[Any]
    fortran_order: bool
    shape: tuple[int, ...]
    length: int  # of the header itself, in bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(stream: BinaryIO, place: str | Path) -> NpyHeader:
    """The header at the beginning of `stream`, which is left where the array begins."""
    start = stream.read(8)
    if len(start) != 8 or start[:6] != _MAGIC or start[6] not in (1, 2, 3):
        raise DataError(f"{place}: does not begin like a NumPy array. It is damaged, or of another kind.")
    size_bytes = 2 if start[6] == 1 else 4
    size = int.from_bytes(stream.read(size_bytes), "little")
    if size > _LONGEST:
        raise DataError(f"{place}: a header of {size} bytes; at most {_LONGEST} are expected. It is damaged.")
    text = stream.read(size)
    found = _PATTERN.fullmatch("".join(text.decode("latin-1").split()))
    if len(text) != size or found is None or None in found.groupdict().values():
        raise DataError(f"{place}: a header that does not describe one plain array. It is damaged, or of another kind.")
    descr, order, sides = found["descr"], found["order"], found["shape"]
    if descr.lstrip("<>|=") not in _DTYPES:
        raise DataError(
            f"{place}: an array of dtype {descr!a}. Needs bytes (uint8), floats or integers; objects and texts are "
            "refused."
        )
    if not _SIDES.fullmatch(sides):
        raise DataError(f"{place}: a header that does not describe one plain array. It is damaged.")
    shape = tuple(int(side.rstrip("L")) for side in sides.split(",") if side)
    return NpyHeader(np.dtype(descr), order == "True", shape, 8 + size_bytes + size)
