"""The library built from depthwise.c, if this installation has it: convolutions of each channel by itself.

What torch does is the reference; results agree within the rounding of float32. Each function says None where the
library is not made for its operands, before any memory is touched.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from darknight.kernels import compiled, threads
from darknight.kernels.compiled import Function
from darknight.kernels.compiled_layers import Affine, Limits, Window, address, cutting, suits, vector

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_LANES, _ROOM_AROUND = 8, 96  # as in depthwise.c: a line may be overrun by a little
_LARGEST = 7  # rows or columns of a kernel
_NEAR = 512  # numbers that are computed at a time, if a line is not longer
_WIDEST = 1024  # numbers in a line


class _Convolution(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("x", "weight", "bias", "grad", "y", "grad_x", "grad_weight", "grad_bias")],
        *[(name, _POINTER) for name in ("lines", "held", "sums")],
        *[(name, _NUMBER) for name in ("planes", "channels", "height", "width", "out_height", "out_width")],
        *[(name, _NUMBER) for name in ("kernel_height", "kernel_width", "step_height", "step_width")],
        *[(name, _NUMBER) for name in ("before_height", "before_width")],
        *[(name, _NUMBER) for name in ("pitch", "rows", "together", "room")],
        *[(name, _POINTER) for name in ("scale", "shift")],
        *[(name, ctypes.c_float) for name in ("low", "high")],
        ("limited", _NUMBER),
    ]


@dataclass(frozen=True)
class Library:
    """The functions of depthwise.c."""

    convolve: Function
    convolve_back: Function

    @classmethod
    def loaded(cls, kind: str = "") -> Library | None:
        """None if one of them is missing. kind: "plain_" or "avx2_" for those variants."""
        found = {
            name: compiled.loaded("depthwise", f"darknight_{name}_{kind}2", (_POINTER,))
            for name in ("convolve", "convolve_back")
        }
        there = {name: function for name, function in found.items() if function is not None}
        return cls(**there) if len(there) == len(found) else None


@cache
def chosen() -> Library | None:
    """The library, or None for torch's own functions."""
    return Library.loaded() if compiled.wanted() else None


@dataclass(frozen=True)
class _Layout:
    """How rows lie in the room that the library works in: in lines of `pitch` numbers.

    So many `rows` of outputs are computed at a time, of so many planes `together`. room: numbers of a phase of a plane.
    """

    pitch: int
    rows: int
    together: int
    room: int

    @classmethod
    def of(cls, x: Tensor, window: Window) -> _Layout:
        (height, width), (tall, wide) = x.shape[2:], window.step
        out_height, out_width = window.outputs(height, width)
        halo, overhang = ((kernel - 1) // step for kernel, step in zip(window.kernel, window.step, strict=True))
        lanes = -(-out_width // _LANES) * _LANES
        pitch = max(out_width + overhang, -(-(width + window.before[1]) // wide), lanes)
        every = max(out_height, -(-(height + window.before[0]) // tall))
        rows = min(every, max(1, _NEAR // pitch))
        room = (rows + halo) * pitch + _ROOM_AROUND
        return cls(pitch, rows, 1 if rows < every else max(1, 2 * _NEAR // room), room)


def can_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> bool:
    """Whether `convolve` is made for these."""
    if not suits(x) or x.dim() != 4 or not suits(weight) or weight.shape != (x.shape[1], 1, *window.kernel):
        return False
    if bias is not None and not vector(bias, x.shape[1]):
        return False
    within = zip(window.kernel, window.step, window.before, strict=True)
    if not all(kernel <= _LARGEST and step in (1, 2) and 0 <= before < kernel for kernel, step, before in within):
        return False
    return min(window.outputs(x.shape[2], x.shape[3])) >= 1 and _Layout.of(x, window).pitch <= _WIDEST


def convolve(
    library: Library,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
    scaling: Affine | None = None,
    limits: Limits | None = None,
) -> Tensor | None:
    """(example, channel, row, column) and (channel, 1, row, column): each channel with its own kernel.

    The result is then scaled and cut to `limits`: bit for bit as by layers.c's affine behind it.
    """
    if not can_convolve(x, weight, bias, window) or not (scaling is None or scaling.of(x.shape[1])):
        return None
    y = torch.empty(*x.shape[:2], *window.outputs(x.shape[2], x.shape[3]))
    taps = window.kernel[0] * window.kernel[1]

    def some(first: int, last: int) -> None:
        what, kept = _convolution(x[first:last], weight, window)
        what.y, what.bias = y[first:last].data_ptr(), address(bias)
        what.low, what.high, what.limited = cutting(limits)
        if scaling is not None:
            what.scale, what.shift = scaling.scale.data_ptr(), scaling.shift.data_ptr()
        library.convolve(ctypes.byref(what))
        del kept

    threads.split(some, len(x), taps * y.numel())
    return y


def convolve_back(
    library: Library, x: Tensor, weight: Tensor, grad: Tensor, window: Window, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """The gradients of x, weight and bias that are wanted."""
    if not can_convolve(x, weight, None, window) or not suits(grad):
        return None
    if grad.shape != (*x.shape[:2], *window.outputs(x.shape[2], x.shape[3])):
        return None
    gx = torch.empty_like(x) if wanted[0] else None
    gw = torch.empty_like(weight) if wanted[1] else None
    gb = torch.empty(x.shape[1]) if wanted[2] else None
    # Memory is read and written twice as fast if not in turns. With a step of two that is more than reading grad again.
    apart = window.step != (1, 1)
    for each in ((gx, None, None), (None, gw, gb)) if apart else ((gx, gw, gb),):
        if any(out is not None for out in each):
            _derive(library, x, weight, grad, window, *each)
    return gx, gw, gb


def _derive(
    library: Library,
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    window: Window,
    gx: Tensor | None,
    gw: Tensor | None,
    gb: Tensor | None,
) -> None:
    examples, channels = x.shape[:2]
    taps = window.kernel[0] * window.kernel[1]

    def some(first: int, last: int) -> None:
        """Some channels, whose sums go on from one example to the next, in the same order as in a single call."""
        what, kept = _convolution(x, weight[first:last], window)
        held = threads.zeros(what.together * what.room + _ROOM_AROUND, dtype=np.float32)
        sums = threads.zeros((last - first) * (taps + 1) * _LANES, dtype=np.float64)
        what.held, what.sums = held.data_ptr(), sums.data_ptr()
        what.grad_weight, what.grad_bias = (None if each is None else each[first:last].data_ptr() for each in (gw, gb))
        what.channels = last - first
        if last - first < channels:
            what.planes = last - first
        for example in range(examples if last - first < channels else 1):
            what.x, what.grad = x[example, first:].data_ptr(), grad[example, first:].data_ptr()
            what.grad_x = None if gx is None else gx[example, first:].data_ptr()
            library.convolve_back(ctypes.byref(what))
        del kept, held, sums

    threads.split(some, channels, taps * grad.numel())


def _convolution(x: Tensor, weight: Tensor, window: Window) -> tuple[_Convolution, Tensor]:
    """What is handed over, and the room for lines of x, which is to be kept meanwhile."""
    layout = _Layout.of(x, window)
    lines = threads.zeros(layout.together * window.step[0] * window.step[1] * layout.room, dtype=np.float32)
    what = _Convolution(x.data_ptr(), weight.data_ptr())
    what.lines = lines.data_ptr()
    what.planes, what.channels, what.height, what.width = x.shape[0] * x.shape[1], *x.shape[1:]
    what.out_height, what.out_width = window.outputs(x.shape[2], x.shape[3])
    what.kernel_height, what.kernel_width = window.kernel
    what.step_height, what.step_width = window.step
    what.before_height, what.before_width = window.before
    what.pitch, what.rows, what.together, what.room = layout.pitch, layout.rows, layout.together, layout.room
    return what, lines
