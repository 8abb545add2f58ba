"""How much memory the strategies beside torch's own ops on doubles take, from shapes alone: an upper bound.

It follows darknight.ops.unfold and darknight.ops.strategy step by step, as darknight.ops.estimate does for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from darknight.ops.conv import Conv
from darknight.ops.conv_transpose import ConvTranspose
from darknight.ops.linear import Linear
from darknight.ops.numbers import FLOAT32, INT8, Cut, Numbers
from darknight.ops.op import Shape
from darknight.ops.strategy import Singles, Strategy, Unfolded, Work
from darknight.ops.unfold import Axes, Block, blocks, forward_axes, input_phases
from darknight.types import Pass

_DOUBLE = 8
_INTEGER = 4
_SLACK = 1 << 16


@dataclass(frozen=True)
class _Widths:
    """Bytes for each element of what the steps make."""

    numbers: Numbers
    cut: Cut

    @property
    def one(self) -> int:
        return self.numbers.dtype.itemsize

    def cutting(self, count: int) -> int:
        """To cut a number into so many digits: the digits, and what is there beside them on the way."""
        aside = 4 * _INTEGER if self.numbers is INT8 else (count + 5) * _DOUBLE
        return aside + count * self.one

    @property
    def sums(self) -> int:
        """A result in all places, and on its way through doubles to a residue."""
        one = _INTEGER if self.numbers is INT8 else self.one
        return (self.cut.places + self.cut.right + 1) * one + 6 * _DOUBLE + 2 * _INTEGER


def strategy_bytes(strategy: Strategy, work: Work) -> int:
    """Bytes beyond operands and result, for a strategy that takes the work and is not Doubles."""
    if isinstance(strategy, Singles):
        return _singles(strategy, work) + _SLACK
    assert isinstance(strategy, Unfolded)
    cut = strategy.cut(work)
    assert cut is not None
    widths = _Widths(strategy.numbers, cut)
    return (_linear if isinstance(work.op, Linear) else _conv)(widths, work) + _SLACK


def _singles(strategy: Singles, work: Work) -> int:
    from_shape, to_shape = _ends(work)
    cut = strategy.cut(work)
    assert cut is not None
    widths = _Widths(FLOAT32, cut)
    padded = 0
    if isinstance(work.op, Conv) and not work.op.padding.symmetric_zeros:
        padded = 2 * prod(work.x_shape[:2]) * prod(work.op.padding.padded(work.x_shape[2:]))
    # torch's convolutions of singles reorder operands and result in blocks of 16 channels
    copies = 2 * widths.one * (_blocked(from_shape) + _blocked(to_shape) + padded)
    operands = prod(from_shape) * widths.cutting(cut.right) + prod(work.w_shape) * (widths.cutting(cut.left) + 64)
    return operands + copies + prod(to_shape) * widths.sums


def _blocked(shape: Shape) -> int:
    return prod(shape) // max(1, shape[1]) * (-(-shape[1] // 16) * 16) if len(shape) > 2 else prod(shape)


def _linear(widths: _Widths, work: Work) -> int:
    cut, (out, inputs) = widths.cut, work.w_shape
    rows = prod(work.x_shape[:-1])
    if work.kind is Pass.GRAD_WEIGHT:
        operands = rows * (inputs * widths.cutting(cut.right) + out * widths.cutting(cut.left))
        return operands + _block(work.op.output_blocks(work.w_shape), out) * inputs * (widths.sums + _INTEGER)
    forward = work.kind is Pass.FORWARD
    blocks_of = work.op.output_blocks if forward else work.op.input_blocks
    inner, outer = (inputs, out) if forward else (out, inputs)
    step = _block(blocks_of(work.w_shape), outer)
    weights = step * inner * (widths.cutting(cut.left) + 2 * cut.overlap * widths.one)
    shares = rows * inner * (widths.cutting(cut.right) + 2 * cut.right * widths.one)
    return shares + weights + step * rows * widths.sums


def _block(parts: tuple[slice, ...], channels: int) -> int:
    return len(range(channels)[parts[0]])


def _conv(widths: _Widths, work: Work) -> int:
    conv = work.op.conv if isinstance(work.op, ConvTranspose) else work.op
    assert isinstance(conv, Conv)
    kernel, cut = work.w_shape[2:], widths.cut
    transposed = isinstance(work.op, ConvTranspose)
    if work.kind is Pass.GRAD_WEIGHT:
        source, delta = (work.y_shape, work.x_shape) if transposed else (work.x_shape, work.y_shape)
        axes = forward_axes(conv, kernel, delta[2:])
        needs, block = _unfolding(widths, source, axes, cut.terms)
        part = delta[1] * _positions(block, axes) * (_INTEGER + widths.cutting(cut.left))
        return needs + part + prod(work.w_shape) * (widths.sums + _INTEGER)
    source, result = _ends(work)
    weights = prod(work.w_shape) * (widths.cutting(cut.left) + cut.products * widths.one + 4 * _INTEGER)
    if (work.kind is Pass.FORWARD) != transposed:
        along = [forward_axes(conv, kernel, result[2:])]
    else:
        along = [phase.axes for phase in input_phases(conv, kernel, result[2:])]
    most = 0
    for axes in along:
        needs, block = _unfolding(widths, source, axes, None)
        most = max(most, needs + result[1] * _positions(block, axes) * widths.sums)
    return weights + most


def _unfolding(widths: _Widths, source: Shape, axes: Axes, most: int | None) -> tuple[int, Block]:
    """Digits of some examples, once as they are and twice with their borders (the next ones come before these go), and
    one block of them unfolded.
    """
    count = widths.cut.right
    depth = count * source[1] * prod(axis.taps for axis in axes) * widths.one
    block = next(blocks(axes, max(1, source[0]), depth, most))
    inner = source[1] * prod(source[2:]) * widths.cutting(count)
    outer = 2 * count * widths.one * source[1] * prod(axis.size for axis in axes)
    return block.many * (inner + outer) + depth * _positions(block, axes), block


def _positions(block: Block, axes: Axes) -> int:
    rows = len(range(block.rows.start, block.rows.stop))
    return block.many * rows * prod(axis.count for axis in axes[1:])


def _ends(work: Work) -> tuple[Shape, Shape]:
    """Of forward and grad input: from which shape to which."""
    return (work.x_shape, work.y_shape) if work.kind is Pass.FORWARD else (work.y_shape, work.x_shape)
