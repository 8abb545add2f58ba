"""The library built from few_rows.c, if this installation has it: fully connected layers of few rows.

What torch does is the reference; results agree within the rounding of float32. Each function says None where the
library is not made for its operands, before any memory is touched.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from darknight.kernels import compiled, threads
from darknight.kernels.compiled import Function
from darknight.kernels.compiled_layers import address, suits, vector

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_MOST_ROWS, _OVERRUN = 32, 64  # as in few_rows.c
_OUTPUTS = 48  # where threads divide outputs: what they write lies in lines of its own, and no loop has a rest
_INPUTS = 64  # and inputs


class _Product(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("x", "weight", "bias", "grad", "y", "grad_x", "grad_weight", "grad_bias")],
        ("laid", _POINTER),
        *[(name, _NUMBER) for name in ("rows", "inputs", "outputs", "first", "last")],
    ]


@dataclass(frozen=True)
class Library:
    """The functions of few_rows.c."""

    multiply: Function
    derive_x: Function
    derive_weight: Function
    lay_rows: Function

    @classmethod
    def loaded(cls, kind: str = "") -> Library | None:
        """None if one of them is missing. kind: "plain_" or "avx2_" for those variants."""
        found = {
            name: compiled.loaded("few_rows", f"darknight_{name}_{'' if name == 'lay_rows' else kind}1", (_POINTER,))
            for name in cls.__dataclass_fields__
        }
        there = {name: function for name, function in found.items() if function is not None}
        return cls(**there) if len(there) == len(found) else None


@cache
def chosen() -> Library | None:
    """The library, or None for torch's own functions."""
    return Library.loaded() if compiled.wanted() else None


def can_multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `multiply` is made for these: (row, input) and (output, input)."""
    if not suits(x) or not suits(weight) or x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return False
    return len(x) <= _MOST_ROWS and (bias is None or vector(bias, len(weight)))


def multiply(library: Library, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x weight^T + bias: (row, output)."""
    if not can_multiply(x, weight, bias):
        return None
    y, laid = torch.empty(len(x), len(weight)), _laid_out(library, x)
    what = _product(x, weight)
    what.x, what.bias, what.y = laid.data_ptr(), address(bias), y.data_ptr()
    _in_parts(library.multiply, what, what.outputs, _OUTPUTS)
    return y


def multiply_back(
    library: Library, x: Tensor, weight: Tensor, grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """The gradients of x, weight and bias that are wanted."""
    if not can_multiply(x, weight, None) or not suits(grad) or grad.shape != (len(x), len(weight)):
        return None
    gx = torch.empty_like(x) if wanted[0] else None
    gw = torch.empty_like(weight) if wanted[1] else None
    gb = torch.empty(len(weight)) if wanted[2] else None
    what = _product(x, weight)
    what.grad = grad.data_ptr()
    if gx is not None:
        what.grad_x = gx.data_ptr()
        _in_parts(library.derive_x, what, what.inputs, _INPUTS)
    if gw is not None or gb is not None:
        laid = None if gw is None else _laid_out(library, x)
        what.x, what.grad_weight, what.grad_bias = address(laid), address(gw), address(gb)
        _in_parts(library.derive_weight, what, what.outputs, _OUTPUTS)
    return gx, gw, gb


def _product(x: Tensor, weight: Tensor) -> _Product:
    return _Product(weight=weight.data_ptr(), rows=len(x), inputs=weight.shape[1], outputs=weight.shape[0])


def _laid_out(library: Library, x: Tensor) -> Tensor:
    """As the library reads it: (line of lanes, row, lane). It begins where a line of the cache does, as torch's do."""
    laid = torch.empty(len(x) * (-(-x.shape[1] // _OVERRUN) * _OVERRUN))
    what = _Product(x=x.data_ptr(), laid=laid.data_ptr(), rows=len(x), inputs=x.shape[1])
    library.lay_rows(ctypes.byref(what))
    return laid


def _in_parts(function: Function, what: _Product, length: int, step: int) -> None:
    def some(first: int, last: int) -> None:
        function(ctypes.byref(threads.part(what, last - first == length, first=first, last=last)))

    threads.split(some, length, what.inputs * what.outputs, step)
