"""The libraries built from the C files beside this one, if this installation has them; here, that of weigh.c.

Plain shared libraries without Python's headers, called through ctypes, which lets other threads run meanwhile. What is
handed over was checked here: a wrong shape raises before any memory is touched.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from darknight.errors import UsageError
from darknight.kernels.reference import rows_of_a_group

VARIABLE = "DARKNIGHT_KERNELS"  # "reference" or "compiled"; without it, compiled where it is installed

_SYMBOL = "darknight_weigh_1"
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_POINTER, *[_NUMBER] * 6, _POINTER, _NUMBER, _NUMBER, _POINTER)
_logger = logging.getLogger("darknight.kernels")

Function = Callable[..., Any]


def suits(values: Tensor, vectors: Tensor) -> bool:
    """Whether the library is made for such operands."""
    return (
        values.dtype == torch.int32
        and vectors.dtype == torch.float64
        and values.device.type == vectors.device.type == "cpu"
        and values.layout == vectors.layout == torch.strided
    )


def weigh(values: Tensor, vectors: Tensor, longest: int, groups: int, function: Function) -> Tensor:
    """As kernels.reference.weigh, for operands that it `suits`: the same to the last bit."""
    length = rows_of_a_group(values, vectors, longest, groups)
    if not suits(values, vectors):
        raise ValueError("weigh: needs int32 and float64 in the processor's memory.")
    (outer, _, columns), reps = values.shape, len(vectors)
    if columns > 1 and values.stride(2) != 1:
        values = values.contiguous()
    vectors = vectors.contiguous()
    blocks = max(1, -(-length // longest))
    out = torch.empty(blocks, outer, groups, reps, columns, dtype=torch.float64)
    if out.numel():
        function(
            values.data_ptr(),
            outer,
            values.stride(0),
            groups,
            length,
            values.stride(1),
            columns,
            vectors.data_ptr(),
            reps,
            longest,
            out.data_ptr(),
        )
    return out


@cache
def chosen() -> Function | None:
    """The library's function, or None for the reference. Said once in the log."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "reference", "compiled"):
        raise UsageError(f"{VARIABLE}={wish!r}; known are reference and compiled.")
    function = None if wish == "reference" else _loaded(_SYMBOL)
    if function is None and wish == "compiled":
        raise UsageError(
            f"{VARIABLE}=compiled, but this installation has no compiled kernels. Install DarKnight where there is a C "
            "compiler."
        )
    if function is None and not wish:
        _logger.warning(
            "no compiled kernels in this installation: masking and checks take several times as long. "
            "Install DarKnight where there is a C compiler to have them."
        )
    else:
        _logger.info("kernels: %s", "reference" if function is None else "compiled")
    return function


def _loaded(symbol: str) -> Function | None:
    return loaded("weigh", symbol, _ARGUMENTS)


def loaded(name: str, symbol: str, arguments: Sequence[type], result: type | None = None) -> Function | None:
    """A function of NAME.c; None where there is no library, or one that is not of these sources or this machine."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_{name}{suffix}")
        if path.exists():
            try:
                function = getattr(ctypes.CDLL(str(path)), symbol)
            except (OSError, AttributeError):
                return None
            function.argtypes, function.restype = arguments, result
            found: Function = function
            return found
    return None
