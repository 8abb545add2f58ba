"""Convolutions and linear layers in the field as products of matrices, block by block.

torch's convolution of doubles unfolds the whole batch into fresh memory, and it has none of whole numbers. Here a block
of positions is unfolded at a time, into a buffer that is used again and stays in the cache, and its product is reduced
modulo the prime before the next one. The input gradient of a convolution is a convolution of the gradient, for each
remainder of the positions modulo the stride.

For convolutions without groups, whose borders are zeros; and for linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

import torch
from torch import Tensor

from darknight.ops.conv import Conv
from darknight.ops.field import centred, joined, least
from darknight.ops.numbers import Cut, Numbers, digits, multiply
from darknight.ops.op import Shape

BLOCK = 1 << 23  # bytes of unfolded digits at a time; less makes products short, more leaves the cache


@dataclass(frozen=True)
class Axis:
    """Along one axis the position p of the result meets, with its tap t, the source at p * step + t * hole - before."""

    step: int
    hole: int
    before: int
    taps: int
    count: int  # of positions

    @property
    def size(self) -> int:
        """Of the part of the source that is met, with the zeros around it."""
        return (self.count - 1) * self.step + (self.taps - 1) * self.hole + 1

    def borders(self, source: int) -> tuple[int, int]:
        """Zeros before and behind a source of this size; fewer than none: so many are left out."""
        return self.before, self.size - source - self.before


Axes = tuple[Axis, ...]


def forward_axes(conv: Conv, kernel: Shape, outputs: Shape) -> Axes:
    """From x to y."""
    along = zip(conv.stride, conv.dilation, conv.padding.amounts, kernel, outputs, strict=True)
    return tuple(Axis(step, hole, before, taps, count) for step, hole, (before, _), taps, count in along)


@dataclass(frozen=True)
class Phase:
    """Positions of gx that meet the same taps: every `step`-th from `first` on, along each axis."""

    positions: tuple[slice, ...]
    taps: tuple[list[int], ...]
    axes: Axes  # from delta to these positions


def input_phases(conv: Conv, kernel: Shape, inputs: Shape) -> Iterator[Phase]:
    """From delta to gx; positions that no tap meets are in none."""
    along = [
        list(_phases_along(step, hole, before, taps, size))
        for step, hole, (before, _), taps, size in zip(
            conv.stride, conv.dilation, conv.padding.amounts, kernel, inputs, strict=True
        )
    ]
    for each in product(*along):
        yield Phase(tuple(part[0] for part in each), tuple(part[1] for part in each), tuple(part[2] for part in each))


def _phases_along(step: int, hole: int, before: int, taps: int, size: int) -> Iterator[tuple[slice, list[int], Axis]]:
    common = gcd(step, hole)
    for first in range(min(step, size)):
        met = [tap for tap in range(taps) if (first + before - tap * hole) % step == 0]
        if met:
            met.reverse()  # from the first position of delta to the last
            begins = (first + before - met[0] * hole) // step
            count = len(range(first, size, step))
            yield slice(first, None, step), met, Axis(1, hole // common, -begins, len(met), count)


# --- block by block ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Block:
    """Some examples, and of their positions those with these along the first axis."""

    examples: slice
    rows: slice

    @property
    def many(self) -> int:
        return int(self.examples.stop - self.examples.start)


def blocks(axes: Axes, examples: int, depth: int, most: int | None = None) -> Iterator[Block]:
    """All positions, so many at a time that a block of them, `depth` bytes for each, is at most BLOCK bytes.

    most: positions at a time. A block has one row of positions at least.
    """
    count, inner = axes[0].count, prod(axis.count for axis in axes[1:])
    positions = max(1, min(BLOCK // max(1, depth), most or BLOCK))
    together, rows = max(1, positions // max(1, count * inner)), max(1, min(count, positions // max(1, inner)))
    for begin in range(0, examples, together):
        for row in range(0, count, rows):
            yield Block(slice(begin, min(examples, begin + together)), slice(row, min(count, row + rows)))


class Unfolding:
    """The digits of a source (example, channel, *spatial), unfolded block by block: (digit * channel * tap, position).

    Blocks must come in the order in which `blocks` gives them.
    """

    def __init__(self, source: Tensor, axes: Axes, count: int, bits: int, numbers: Numbers, prime: int) -> None:
        self._source, self._axes = source, axes
        self._borders = [each for axis, size in zip(axes, source.shape[2:], strict=True) for each in axis.borders(size)]
        self._digits: Callable[[Tensor], list[Tensor]] = lambda part: digits(part, count, bits, numbers, prime)
        self._examples: slice | None = None
        self._planes = self._buffer = torch.empty(0, dtype=numbers.dtype, device=source.device)
        self.depth = count * source.shape[1] * prod(axis.taps for axis in axes)

    def __call__(self, block: Block) -> Tensor:
        if self._examples != block.examples:
            self._examples = block.examples
            self._planes = self._padded(self._digits(self._source[block.examples]))
        view = self._windows(block.rows)
        columns = view.numel() // max(1, self.depth)
        if view.is_contiguous():
            return view.view(self.depth, columns)
        if self._buffer.numel() < view.numel():
            self._buffer = torch.empty(view.numel(), dtype=view.dtype, device=view.device)
        unfolded = self._buffer[: view.numel()]
        unfolded.view(view.shape).copy_(view)
        return unfolded.view(self.depth, columns)

    def _padded(self, parts: list[Tensor]) -> Tensor:
        """(digit, example, channel, *spatial) with the zeros around it."""
        if not any(self._borders):
            return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
        shape = (len(parts), *parts[0].shape[:2], *(axis.size for axis in self._axes))
        planes = parts[0].new_zeros(shape)
        inner, kept = [], []
        for axis, size in zip(self._axes, parts[0].shape[2:], strict=True):
            before, behind = axis.borders(size)
            kept.append(slice(max(0, -before), size - max(0, -behind)))
            inner.append(slice(max(0, before), axis.size - max(0, behind)))
        for plane, part in zip(planes, parts, strict=True):
            plane[(slice(None), slice(None), *inner)] = part[(slice(None), slice(None), *kept)]
        return planes

    def _windows(self, rows: slice) -> Tensor:
        """A view: (digit, channel, *tap, example, *position)."""
        digit, example, channel, *along = self._planes.stride()
        sizes, steps = list(self._planes.shape), list(zip(along, self._axes, strict=True))
        counts = [rows.stop - rows.start, *(axis.count for axis in self._axes[1:])]
        return self._planes.as_strided(
            (sizes[0], sizes[2], *(axis.taps for axis in self._axes), sizes[1], *counts),
            (
                digit,
                channel,
                *(stride * axis.hole for stride, axis in steps),
                example,
                *(stride * axis.step for stride, axis in steps),
            ),
            self._planes.storage_offset() + rows.start * along[0] * self._axes[0].step,
        )


# --- the passes -------------------------------------------------------------------------------------------------------
def correlated(
    source: Tensor, weight: Tensor, axes: Axes, numbers: Numbers, cut: Cut, prime: int, near: bool, out: Tensor
) -> None:
    """out (example, row, *position) = sum over channels and taps of weight (row, channel, *tap) times the source.

    near: no weight is above prime / 2 in magnitude.
    """
    rows, inner = weight.shape[0], prod(weight.shape[1:])
    parts = digits(weight.reshape(rows, inner), cut.left, cut.bits, numbers, prime, near)
    left = [torch.cat([parts[place - other] for other in cut.meeting(place)], 1) for place in range(cut.places)]
    largest = [len(cut.meeting(place)) * cut.largest * inner for place in range(cut.places)]
    unfolding = Unfolding(source, axes, cut.right, cut.bits, numbers, prime)
    for block in blocks(axes, len(source), unfolding.depth * numbers.dtype.itemsize):
        unfolded = unfolding(block)
        sums = []
        for place in range(cut.places):
            met = cut.meeting(place)
            sums.append(multiply(left[place], unfolded[met.start * inner : met.stop * inner]))
        found = least(*joined(sums, cut.bits, largest, prime), prime)
        target = out[block.examples, :, block.rows]
        target.copy_(found.view(rows, block.many, *target.shape[2:]).transpose(0, 1))


def weight_gradient(
    source: Tensor, delta: Tensor, axes: Axes, kernel: Shape, numbers: Numbers, cut: Cut, prime: int
) -> Tensor:
    """(row, channel, *tap): sum over examples and positions of delta (example, row, *position) times the source."""
    rows, inner = delta.shape[1], source.shape[1] * prod(kernel)
    unfolding = Unfolding(source, axes, cut.right, cut.bits, numbers, prime)
    total = Sum((rows, inner), cut, prime, delta.device)
    for block in blocks(axes, len(source), unfolding.depth * numbers.dtype.itemsize, cut.terms):
        unfolded = unfolding(block).view(cut.right, inner, -1)
        part = delta[block.examples, :, block.rows].transpose(0, 1).reshape(rows, -1)
        total.add(digits(part, cut.left, cut.bits, numbers, prime), [each.t() for each in unfolded])
    return total.residues().view(rows, source.shape[1], *kernel)


class Sum:
    """A sum of products of digits, kept by place, and reduced modulo the prime only when it has to be."""

    def __init__(self, shape: tuple[int, int], cut: Cut, prime: int, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._cut, self._prime = cut, prime
        self._places: list[Tensor] = []
        self._terms = 0
        self._total: Tensor | None = None

    def add(self, left: list[Tensor], right: list[Tensor]) -> None:
        """left (rows, term), right (term, columns), digit by digit; at most cut.terms terms."""
        terms = left[0].shape[1]
        if self._terms + terms > self._cut.terms:
            self._reduce()
        self._terms += terms
        for place in range(self._cut.places):
            for other in self._cut.meeting(place):
                found = multiply(left[place - other], right[other])
                if len(self._places) == place:
                    self._places.append(found)
                else:
                    self._places[place] += found

    def _reduce(self) -> None:
        if self._places:
            part = centred(self._joined()[0], self._prime)
            self._total = part if self._total is None else centred(self._total.add_(part), self._prime)
        self._places, self._terms = [], 0

    def _joined(self) -> tuple[Tensor, float]:
        cut = self._cut
        largest = [len(cut.meeting(place)) * cut.largest * self._terms for place in range(cut.places)]
        return joined(self._places, cut.bits, largest, self._prime)

    def residues(self) -> Tensor:
        if self._total is None and self._places:
            return least(*self._joined(), self._prime)
        self._reduce()
        if self._total is None:
            return torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return least(self._total, float(self._prime), self._prime)
