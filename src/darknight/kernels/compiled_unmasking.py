"""The library built from unmasking.c, if this installation has it: unmasking, and the weighed sums of its check.

It says None where the library is not made for its operands, before any memory is touched; they are then unmasked and
weighed apart, with the same results to the last bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from darknight.kernels import compiled, threads
from darknight.kernels.compiled import Function
from darknight.kernels.compiled_field import Combination, Form, numbers, plain, pointers, without_gaps_inside
from darknight.kernels.compiled_layers import Affine, Limits
from darknight.kernels.compiled_residues import array_of

_POINTER, _NUMBER, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32
_MOST_RESULTS, _MOST_ANSWERS, _MOST_REPETITIONS = 8, 16, 2
_FAR = 4096  # positions of a single result: a tile would touch a page for each of its short runs, which takes longer


class _Unmasking(ctypes.Structure):
    _fields_ = [
        ("what", Combination),
        ("sources", _POINTER),
        ("source_strides", _POINTER),
        ("floats", _POINTER),
        ("scale", _FLOAT),
        ("bias", _POINTER),
        ("factor", _POINTER),
        ("shift", _POINTER),
        ("low", _FLOAT),
        ("high", _FLOAT),
        ("limited", _NUMBER),
        ("outside", _POINTER),
        *((name, _NUMBER) for name in ("examples", "groups", "lines", "channels", "positions")),
        ("u", _POINTER),
        ("v", _POINTER),
        *((name, _NUMBER) for name in ("reps", "longest", "often")),
        ("primes", _POINTER),
        ("moduli", _NUMBER),
        ("out", _POINTER),
    ]


@dataclass(eq=False, kw_only=True, slots=True)
class Weighing:
    """How results (row, channel, position) are weighed: channels (rep, channel) and rows (rep, row), float64 integers.

    Modulo each of the primes, exactly: `longest` channels, and `often` rows, can be summed before a reduction.
    """

    channels: Tensor
    rows: Tensor
    positions: int
    primes: tuple[int, ...]
    longest: int
    often: int


@cache
def chosen(kind: str = "") -> Function | None:
    """The function, or None. kind: "plain_" for that without vector instructions of this processor."""
    if not kind and not compiled.wanted():
        return None
    return compiled.loaded("unmasking", f"darknight_unmask_{kind}3", (ctypes.c_void_p,))


@cache
def _in_strips() -> bool:
    """Whether the sum of all answers is made in strips, and not in tiles."""
    totals = compiled.loaded("unmasking", "darknight_unmask_totals_3", (), ctypes.c_int64)
    return totals is not None and bool(totals())


def unmask(
    function: Function,
    form: Form,
    sources: Sequence[Tensor],
    floats: Tensor,
    scale: float,
    weighing: Weighing,
    bias: Tensor | None = None,
    limits: Limits | None = None,
    scaling: Affine | None = None,
) -> tuple[list[int], Tensor] | None:
    """Sources (group, ...) -> floats (example, ...); (places of sources outside the field, (modulus, rep, position)).

    bias: of each channel, added to the floats, which are then scaled and cut to `limits`. None if it is not for these.
    """
    if bias is not None and not (plain(bias, torch.float32) and bias.shape == weighing.channels.shape[1:]):
        return None
    if scaling is not None and not scaling.of(weighing.channels.shape[1]):
        return None
    structure, (reps, channels) = form.structure(), weighing.channels.shape
    results, examples, groups = len(form.matrix), floats.shape[0], sources[0].shape[0]
    width = channels * weighing.positions
    if structure is None or results > _MOST_RESULTS or len(sources) > _MOST_ANSWERS or reps > _MOST_REPETITIONS:
        return None
    if results == 1 and weighing.positions >= _FAR and not (_in_strips() and set(form.matrix[0]) == {1}):
        return None
    if not examples or not width or groups != -(-examples // results):
        return None
    lines, rest = divmod(floats.numel() // examples, width)
    if rest:
        return None
    shape = (groups, *floats.shape[1:])
    for each in sources:
        if each.shape != shape or not without_gaps_inside(each, torch.int32):
            return None
    if not plain(floats, torch.float32) or not floats.is_contiguous():
        return None
    if weighing.rows.shape != (reps, examples * lines) or not form.centred or len(sources) != len(form.ranges):
        return None
    u, v = weighing.channels.contiguous(), weighing.rows.contiguous()
    if not plain(u, torch.float64) or not plain(v, torch.float64):
        return None
    bias = None if bias is None else bias.detach().contiguous()
    low, high = limits or (0.0, 0.0)
    strides = [each.stride(0) for each in sources]
    steps = numbers(strides)
    what = _Unmasking(
        structure,
        None,
        ctypes.addressof(steps),
        floats.data_ptr(),
        scale,
        None if bias is None else bias.data_ptr(),
        None if scaling is None else scaling.scale.data_ptr(),
        None if scaling is None else scaling.shift.data_ptr(),
        low,
        high,
        limits is not None,
        None,
        examples,
        groups,
        lines,
        channels,
        weighing.positions,
        u.data_ptr(),
        v.data_ptr(),
        reps,
        weighing.longest,
        weighing.often,
        array_of(weighing.primes),
        len(weighing.primes),
    )

    def some(first: int, last: int) -> tuple[list[int], Tensor]:
        before, behind = first * results, min(examples, last * results)
        rows = v if behind - before == examples else v[:, before * lines : behind * lines].contiguous()
        sums = torch.empty(len(weighing.primes), reps, weighing.positions, dtype=torch.int32)
        places = pointers(sources, [first * stride for stride in strides] if first else None)
        outside = (_INT * len(sources))()
        mine = threads.part(what, last - first == groups)
        mine.sources, mine.outside = ctypes.addressof(places), ctypes.addressof(outside)
        mine.floats, mine.v = floats.data_ptr() + 4 * before * lines * width, rows.data_ptr()
        mine.examples, mine.groups, mine.out = behind - before, last - first, sums.data_ptr()
        function(ctypes.byref(mine))
        return [place for place, flag in enumerate(outside) if flag], sums

    found = threads.split(some, groups, floats.numel())
    if len(found) == 1:
        return found[0]
    outside = sorted({place for places, _ in found for place in places})
    return outside, _added([sums for _, sums in found], weighing.primes)


def _added(parts: Sequence[Tensor], primes: Sequence[int]) -> Tensor:
    """Residues next to zero, (modulus, rep, position), of the sums of these; in the first of them."""
    moduli, total = np.array(primes, np.int32)[:, None, None], parts[0].numpy()
    for part in parts[1:]:
        total += part.numpy()  # below 2^28
        total -= moduli * (total > moduli // 2)
        total += moduli * (total < -(moduli // 2))
    return parts[0]
