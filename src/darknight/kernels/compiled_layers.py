"""The library built from layers.c, if this installation has it: what stays in the enclave, in few passes.

Batch normalisation, max pooling, and what stands behind a product: its bias and activation, and their gradients.

What torch does is the reference; results agree within the rounding of float32. Each function says None where the
library is not made for its operands, before any memory is touched.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from math import inf, prod

import torch
from torch import Tensor

from darknight.kernels import compiled, threads
from darknight.kernels.compiled import Function

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_MOST_TAPS = 255  # one of 255 is told by a byte
_WIDEST = 1024  # output positions in a row of a pooling


class _Normalisation(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("x", "y")],
        *[(name, _NUMBER) for name in ("examples", "channels", "inner")],
        *[(name, _POINTER) for name in ("weight", "bias", "running_mean", "running_var")],
        *[(name, ctypes.c_double) for name in ("momentum", "epsilon")],
        *[(name, _POINTER) for name in ("scale", "shift", "mean", "inverse")],
        *[(name, ctypes.c_float) for name in ("low", "high")],
        *[(name, _NUMBER) for name in ("limited", "first", "last")],
        ("added", _POINTER),
    ]


class _Derivation(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("x", "grad", "out")],
        *[(name, _NUMBER) for name in ("examples", "channels", "inner")],
        *[(name, _POINTER) for name in ("scale", "shift", "mean", "inverse")],
        *[(name, ctypes.c_float) for name in ("low", "high")],
        ("limited", _NUMBER),
        *[(name, _POINTER) for name in ("weight", "bias", "largest", "y", "passed")],
        *[(name, _NUMBER) for name in ("first", "last")],
    ]


class _Pooling(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("x", "y", "taps")],
        *[(name, _NUMBER) for name in ("planes", "height", "width", "out_height", "out_width")],
        *[(name, _NUMBER) for name in ("kernel_height", "kernel_width", "step_height", "step_width")],
        *[(name, _NUMBER) for name in ("before_height", "before_width")],
    ]


class _Finishing(ctypes.Structure):
    _fields_ = [
        ("y", _POINTER),
        *[(name, _NUMBER) for name in ("examples", "channels", "inner")],
        ("bias", _POINTER),
        *[(name, ctypes.c_float) for name in ("low", "high")],
        ("limited", _NUMBER),
        *[(name, _POINTER) for name in ("scale", "shift")],
    ]


class _Returning(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("grad", "y", "out")],
        *[(name, _NUMBER) for name in ("examples", "channels", "inner")],
        *[(name, ctypes.c_float) for name in ("low", "high")],
        *[(name, _POINTER) for name in ("sums", "largest")],
        *[(name, _NUMBER) for name in ("first", "last")],
    ]


Limits = tuple[float, float]  # what an activation cuts its input to


@dataclass(frozen=True, eq=False)
class Returned:
    """A gradient on its way back, its largest magnitude, and its sums by channel where somebody took them."""

    grad: Tensor
    largest: float
    sums: Tensor | None = None


@dataclass(frozen=True)
class Library:
    """The functions of layers.c."""

    normalise: Function
    affine: Function
    by_running: Function
    derive: Function
    pool: Function
    unpool: Function
    finish: Function
    come_back: Function

    @classmethod
    def loaded(cls, kind: str = "") -> Library | None:
        """None if one of them is missing. kind: "plain_" or "avx2_" for those variants."""
        found = {
            name: compiled.loaded("layers", f"darknight_{name}_{kind}4", (_POINTER,))
            for name in cls.__dataclass_fields__
        }
        there = {name: function for name, function in found.items() if function is not None}
        return cls(**there) if len(there) == len(found) else None


@cache
def chosen() -> Library | None:
    """The library, or None for torch's own functions."""
    return Library.loaded() if compiled.wanted() else None


# --- batch normalisation ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Normalised:
    """What backward needs: by channel, y = x * scale + shift, and the mean and 1 / deviation that made them so."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    inverse: Tensor


def can_normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, running: tuple[Tensor, Tensor] | None) -> bool:
    """Whether `normalise` is made for these. (What to say about a single value for each channel, torch knows.)"""
    if not suits(x) or x.numel() <= x.shape[1]:
        return False
    vectors = [each for each in (weight, bias, *(running or ())) if each is not None]
    return all(vector(each, x.shape[1]) for each in vectors)


def normalise(
    library: Library,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    epsilon: float,
    limits: Limits | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Normalised] | None:
    """(example, channel, ...) with the mean and deviation of the batch; `running` ones are updated in place.

    added: to the result. limits: what it is cut to then. Bit for bit as by a sum and an activation behind it.
    """
    if not can_normalise(x, weight, bias, running) or not can_add(x, added):
        return None
    (examples, channels), inner = x.shape[:2], prod(x.shape[2:])
    y, scale, shift = torch.empty_like(x), torch.empty(channels), torch.empty(channels)
    mean, inverse = torch.empty(channels, dtype=torch.float64), torch.empty(channels, dtype=torch.float64)
    means, variances = running or (None, None)
    what = _Normalisation(
        x.data_ptr(),
        y.data_ptr(),
        examples,
        channels,
        inner,
        address(weight),
        address(bias),
        address(means),
        address(variances),
        momentum,
        epsilon,
        scale.data_ptr(),
        shift.data_ptr(),
        mean.data_ptr(),
        inverse.data_ptr(),
        *cutting(limits),
    )
    what.added = address(added)
    _by_channels(library.normalise, what, x)
    return y, Normalised(scale, shift, mean, inverse)


def can_add(x: Tensor, added: Tensor | None) -> bool:
    """Whether that can be added to what was made of x."""
    return added is None or (suits(added) and added.shape == x.shape)


@dataclass(frozen=True, eq=False)
class Affine:
    """What a batch normalisation does in evaluation, by channel: y = x * scale + shift."""

    scale: Tensor
    shift: Tensor

    def of(self, channels: int) -> bool:
        """Whether it is for so many."""
        return vector(self.scale, channels) and vector(self.shift, channels)


def by_running(
    library: Library, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Affine | None:
    """What it does with these statistics. All are asked in every call: nobody tells when one of them changes."""
    (channels,) = mean.shape if mean.dim() == 1 else (0,)
    if not channels or not all(vector(each, channels) for each in (mean, variance, weight, bias) if each is not None):
        return None
    scale, shift = torch.empty(2, channels)
    what = _Normalisation(channels=channels, epsilon=epsilon, scale=scale.data_ptr(), shift=shift.data_ptr())
    what.running_mean, what.running_var = mean.data_ptr(), variance.data_ptr()
    what.weight, what.bias = address(weight), address(bias)
    library.by_running(ctypes.byref(what))
    return Affine(scale, shift)


def affine(
    library: Library,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    limits: Limits | None = None,
    added: Tensor | None = None,
) -> Tensor | None:
    """x * scale + shift, by channel, and `added`, cut to `limits`."""
    if not suits(x) or not (vector(scale, x.shape[1]) and vector(shift, x.shape[1])) or not can_add(x, added):
        return None
    y = torch.empty_like(x)
    what = _Normalisation(x.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1], prod(x.shape[2:]))
    what.scale, what.shift = scale.data_ptr(), shift.data_ptr()
    what.low, what.high, what.limited = cutting(limits)
    what.added = address(added)
    _by_channels(library.affine, what, x)
    return y


def derive(
    library: Library, x: Tensor, grad: Tensor, by: Normalised, limits: Limits | None, y: Tensor | None = None
) -> tuple[Returned, Tensor, Tensor, Tensor] | None:
    """The gradients of x, weight and bias, and what of `grad` came through the activation.

    limits: outside them an activation behind it let no gradient pass. y: what that gave, if something was added before.
    Without an activation, or if nothing was added, the last one is `grad`.
    """
    if not (suits(x) and suits(grad)) or x.shape != grad.shape or not can_add(x, y):
        return None
    out, weight, bias = torch.empty_like(x), torch.empty(x.shape[1]), torch.empty(x.shape[1])
    passed = grad if y is None else torch.empty_like(grad)
    what = _Derivation(
        x.data_ptr(),
        grad.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        prod(x.shape[2:]),
        by.scale.data_ptr(),
        by.shift.data_ptr(),
        by.mean.data_ptr(),
        by.inverse.data_ptr(),
        *cutting(limits),
        weight.data_ptr(),
        bias.data_ptr(),
    )
    what.y, what.passed = address(y), None if y is None else passed.data_ptr()
    return Returned(out, _largest_by_channels(library.derive, what, x)), weight, bias, passed


# --- behind a product -------------------------------------------------------------------------------------------------
def finish(
    library: Library,
    y: Tensor,
    channel: int,
    bias: Tensor | None,
    limits: Limits | None,
    scaling: Affine | None = None,
) -> bool:
    """Adds `bias` along the axis `channel`, scales, and cuts to `limits`, in place. False if it is not for these.

    Bit for bit what torch's sum, `affine` and torch's activation give.
    """
    if not suits(y) or (bias is not None and not vector(bias, y.shape[channel])):
        return False
    if scaling is not None and not scaling.of(y.shape[channel]):
        return False
    examples, channels, inner = _by_channel(y, channel)
    what = _Finishing(y.data_ptr(), examples, channels, inner, address(bias), *cutting(limits))
    if scaling is not None:
        what.scale, what.shift = scaling.scale.data_ptr(), scaling.shift.data_ptr()

    def some(first: int, last: int) -> None:
        place = y.data_ptr() + 4 * first * channels * inner
        library.finish(ctypes.byref(threads.part(what, last - first == examples, y=place, examples=last - first)))

    threads.split(some, examples, y.numel())
    return True


def can_come_back(grad: Tensor) -> bool:
    """Whether `come_back` is made for it."""
    return suits(grad)


def come_back(
    library: Library, grad: Tensor, channel: int, y: Tensor | None = None, limits: Limits | None = None
) -> Returned | None:
    """What of `grad` passes an activation that gave y by cutting to `limits`; everything if there was none.

    Bit for bit what torch's activation lets pass; the sums are float64. largest is infinite if one is NaN.
    """
    if not suits(grad) or (y is not None and (not suits(y) or y.shape != grad.shape)):
        return None
    sums = torch.zeros(grad.shape[channel], dtype=torch.float64)
    out = grad if y is None else torch.empty_like(grad)
    what = _Returning(
        grad.data_ptr(),
        address(y),
        None if y is None else out.data_ptr(),
        *_by_channel(grad, channel),
        *cutting(limits)[:2],
        sums.data_ptr(),
    )
    return Returned(out, _largest_by_channels(library.come_back, what, grad), sums)


def _by_channels(function: Function, what: _Normalisation, values: Tensor) -> None:
    """Each channel by one thread, so that its sums are in one order."""

    def some(first: int, last: int) -> None:
        function(ctypes.byref(threads.part(what, last - first == what.channels, first=first, last=last)))

    threads.split(some, what.channels, values.numel())


def _largest_by_channels(function: Function, what: _Derivation | _Returning, values: Tensor) -> float:
    """The same; and the largest magnitude of what was written."""

    def some(first: int, last: int) -> int:
        largest = ctypes.c_int32()
        mine = threads.part(what, last - first == what.channels, first=first, last=last)
        mine.largest = ctypes.addressof(largest)
        function(ctypes.byref(mine))
        return largest.value

    return _of_bits(ctypes.c_int32(max(threads.split(some, what.channels, values.numel()))))


def cutting(limits: Limits | None) -> tuple[float, float, bool]:
    """As the library takes limits: both of them, and whether there are any."""
    return (*(limits or (-inf, inf)), limits is not None)


def _by_channel(values: Tensor, channel: int) -> tuple[int, int, int]:
    """How many runs of how many channels of how many positions."""
    axis = channel % values.dim()
    return prod(values.shape[:axis]), values.shape[axis], prod(values.shape[axis + 1 :])


def _of_bits(bits: ctypes.c_int32) -> float:
    """A magnitude, infinite if it is not a number."""
    value = ctypes.c_float.from_buffer(bits).value
    return inf if value != value else value


# --- max pooling ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Window:
    """Of a pooling over two axes: kernel, stride and padding, each (height, width)."""

    kernel: tuple[int, int]
    step: tuple[int, int]
    before: tuple[int, int]

    def outputs(self, height: int, width: int) -> tuple[int, int]:
        sizes = zip((height, width), self.kernel, self.step, self.before, strict=True)
        rows, columns = ((size + 2 * before - kernel) // step + 1 for size, kernel, step, before in sizes)
        return rows, columns

    @property
    def usual(self) -> bool:
        """Whether every window meets an input, and a byte can tell which."""
        inside = all(2 * before <= kernel for kernel, before in zip(self.kernel, self.before, strict=True))
        return inside and prod(self.kernel) <= _MOST_TAPS and min(*self.kernel, *self.step) >= 1


def can_pool(x: Tensor, window: Window) -> bool:
    """Whether `pool` is made for these."""
    if not suits(x) or x.dim() != 4 or not window.usual:
        return False
    rows, columns = window.outputs(x.shape[2], x.shape[3])
    return min(rows, columns) >= 1 and columns <= _WIDEST


def pool(library: Library, x: Tensor, window: Window, keep: bool) -> tuple[Tensor, Tensor | None] | None:
    """(example, channel, height, width) -> the largest of every window; with `keep`, which of them it was."""
    if not can_pool(x, window):
        return None
    rows, columns = window.outputs(x.shape[2], x.shape[3])
    y = torch.empty(x.shape[0], x.shape[1], rows, columns)
    taps = torch.empty(y.shape, dtype=torch.uint8) if keep else None
    _by_planes(library.pool, _pooling(x, y, taps, x, y, window), x, y, taps)
    return y, taps


def unpool(library: Library, grad: Tensor, taps: Tensor, shape: torch.Size, window: Window) -> Tensor | None:
    """The gradient of an input of this shape."""
    if not suits(grad) or grad.shape != taps.shape:
        return None
    out = torch.empty(shape)
    _by_planes(library.unpool, _pooling(grad, out, taps, out, grad, window), grad, out, taps)
    return out


def _by_planes(function: Function, what: _Pooling, source: Tensor, target: Tensor, taps: Tensor | None) -> None:
    planes = what.planes
    read, written, counted = (0 if each is None else each.nbytes // planes for each in (source, target, taps))

    def some(first: int, last: int) -> None:
        mine = threads.part(
            what,
            last - first == planes,
            x=source.data_ptr() + first * read,
            y=target.data_ptr() + first * written,
            taps=threads.moved(address(taps), first * counted),
            planes=last - first,
        )
        function(ctypes.byref(mine))

    threads.split(some, planes, max(source.numel(), target.numel()))


def _pooling(source: Tensor, target: Tensor, taps: Tensor | None, x: Tensor, y: Tensor, window: Window) -> _Pooling:
    sizes = (x.shape[0] * x.shape[1], *x.shape[2:], *y.shape[2:], *window.kernel, *window.step, *window.before)
    return _Pooling(source.data_ptr(), target.data_ptr(), address(taps), *sizes)


def suits(values: Tensor) -> bool:
    return (
        values.dtype == torch.float32
        and values.dim() >= 2
        and values.is_cpu
        and values.layout == torch.strided
        and values.is_contiguous()
        and values.numel() > 0
    )


def vector(values: Tensor, length: int) -> bool:
    return values.dtype == torch.float32 and values.is_cpu and values.shape == (length,) and values.is_contiguous()


def address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()
