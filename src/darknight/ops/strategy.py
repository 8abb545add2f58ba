"""Ways to compute a pass in the field: all give the same bits, and which one is fastest depends on device and shapes.

    float64            torch's own op on doubles, in the fewest limbs: every op, every device (darknight.ops.field)
    float64-unfolded   products of matrices of doubles, block by block
    float32            torch's own op on singles, in digits: for short sums, such as depthwise convolutions
    float32-unfolded   products of matrices of singles, block by block
    int8-unfolded      products of matrices of bytes, block by block: tensor cores, VNNI

Singles are multiplied by torch's own convolution on processors alone: on a GPU it may take TF32, or Winograd's way,
which rounds. As matrices they are multiplied with TF32 switched off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from darknight.ops import field
from darknight.ops.conv import Conv
from darknight.ops.conv_transpose import ConvTranspose
from darknight.ops.linear import Linear
from darknight.ops.numbers import (
    FLOAT32,
    FLOAT64,
    INT8,
    Cut,
    Numbers,
    cut_for,
    digits,
    full_precision,
    multiply,
)
from darknight.ops.op import BilinearOp, Shape
from darknight.ops.unfold import Sum, correlated, forward_axes, input_phases, weight_gradient
from darknight.types import Pass

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One pass of an op on shapes. largest: an upper bound of |weight|, of any magnitude below the prime."""

    op: BilinearOp
    kind: Pass
    x_shape: Shape
    w_shape: Shape
    prime: int
    largest: float

    @property
    def y_shape(self) -> Shape:
        return self.op.output_shape(self.x_shape, self.w_shape)

    @property
    def half(self) -> int:
        return self.prime // 2

    @property
    def near(self) -> bool:
        """Whether weights need no centring."""
        return self.largest <= self.half

    @property
    def weight(self) -> float:
        """The largest magnitude of a weight that was centred."""
        return min(self.largest, float(self.half))


class Strategy(ABC):
    """A way to compute. Operands by pass: x and w, delta and w, x and delta. All but w are residues, and so is what it
    gives, in int32.
    """

    name: str

    @abstractmethod
    def takes(self, work: Work, device: torch.device) -> bool:
        """Whether it can do this, exactly."""

    @abstractmethod
    def compute(self, work: Work, first: Tensor, second: Tensor) -> Tensor:
        """The result; raises OpError on operands that do not fit each other."""


class Doubles(Strategy):
    """What darknight.ops.field does: it takes everything."""

    name = "float64"

    def takes(self, work: Work, device: torch.device) -> bool:
        return True

    def compute(self, work: Work, first: Tensor, second: Tensor) -> Tensor:
        if work.kind is Pass.FORWARD:
            return field.forward(work.op, first, second, work.prime)
        if work.kind is Pass.GRAD_INPUT:
            return field.grad_input(work.op, first, second, work.x_shape, work.prime)
        return field.grad_weight(work.op, first, second, work.w_shape, work.prime)


class Singles(Strategy):
    """torch's own op on digits in float32, all at once for each pair of digits."""

    name = "float32"

    def takes(self, work: Work, device: torch.device) -> bool:
        if device.type == "cuda":
            return False
        cut = self.cut(work)
        return cut is not None and cut.products <= _FEW

    def cut(self, work: Work) -> Cut | None:
        if work.kind is Pass.GRAD_WEIGHT:  # it sums over all positions: far too long for 24 bits
            return None
        return cut_for(FLOAT32, work.weight, work.half, terms_of(work))

    def compute(self, work: Work, first: Tensor, second: Tensor) -> Tensor:
        cut = _known(self.cut(work))
        if work.kind is Pass.GRAD_INPUT:
            return self._sum(cut, work, first, second, lambda delta, w: work.op.grad_input(delta, w, work.x_shape))
        return self._sum(cut, work, first, second, work.op.forward)

    @staticmethod
    def _sum(cut: Cut, work: Work, share: Tensor, w: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        right = digits(share, cut.right, cut.bits, FLOAT32, work.prime)
        left = digits(w, cut.left, cut.bits, FLOAT32, work.prime, work.near)
        sums, largest, terms = [], [], terms_of(work)
        with full_precision():
            for place in range(cut.places):
                met = cut.meeting(place)
                parts = [product(right[other], left[place - other]) for other in met]
                sums.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
                largest.append(len(met) * cut.largest * terms)
        return field.least(*field.joined(sums, cut.bits, largest, work.prime), work.prime)


class Unfolded(Strategy):
    """darknight.ops.unfold in a number format."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.name = f"{numbers.name}-unfolded"

    def takes(self, work: Work, device: torch.device) -> bool:
        if self.numbers is FLOAT32 and device.type == "cpu":  # half as many products of doubles take as long
            return False
        conv = _conv_of(work.op)
        if conv is not None and (conv.groups > 1 or conv.padding.mode != "zeros" or prod(conv.stride) > _MOST_PHASES):
            return False
        if conv is None and not isinstance(work.op, Linear):
            return False
        cut = self.cut(work)
        if cut is None or work.kind is not Pass.GRAD_WEIGHT:
            return cut is not None
        return conv is None or prod(_positions(work)[1:]) <= cut.terms

    def cut(self, work: Work) -> Cut | None:
        if work.kind is not Pass.GRAD_WEIGHT:
            return cut_for(self.numbers, work.weight, work.half, terms_of(work))
        terms = work.x_shape[0] * work.op.positions(work.x_shape, work.y_shape)
        return cut_for(self.numbers, work.half, work.half, max(1, min(terms, _AT_ONCE)))

    def compute(self, work: Work, first: Tensor, second: Tensor) -> Tensor:
        cut = _known(self.cut(work))
        with full_precision():
            if isinstance(work.op, Linear):
                return self._linear(work, cut, first, second)
            return self._conv(work, cut, first, second)

    def _conv(self, work: Work, cut: Cut, first: Tensor, second: Tensor) -> Tensor:
        conv, kernel = _known(_conv_of(work.op)), work.w_shape[2:]
        transposed = isinstance(work.op, ConvTranspose)
        if work.kind is Pass.GRAD_WEIGHT:
            source, delta = (second, first) if transposed else (first, second)
            axes = forward_axes(conv, kernel, tuple(delta.shape[2:]))
            return weight_gradient(source, delta, axes, kernel, self.numbers, cut, work.prime)
        shape = work.y_shape if work.kind is Pass.FORWARD else work.x_shape
        out = torch.empty(shape, dtype=torch.int32, device=first.device)
        if (work.kind is Pass.FORWARD) != transposed:
            axes = forward_axes(conv, kernel, shape[2:])
            correlated(first, second, axes, self.numbers, cut, work.prime, work.near, out)
            return out
        phases = list(input_phases(conv, kernel, shape[2:]))
        if len(phases) < prod(conv.stride):  # some positions meet no tap
            out.zero_()
        for phase in phases:
            weight = second.transpose(0, 1)
            for axis, taps in enumerate(phase.taps):
                weight = weight.index_select(2 + axis, torch.tensor(taps, device=weight.device))
            part = out[(slice(None), slice(None), *phase.positions)]
            correlated(first, weight, phase.axes, self.numbers, cut, work.prime, work.near, part)
        return out

    def _linear(self, work: Work, cut: Cut, first: Tensor, second: Tensor) -> Tensor:
        left = work.op.rows(first)
        if work.kind is Pass.GRAD_WEIGHT:
            return self._outer(work, cut, left, work.op.rows(second))
        forward = work.kind is Pass.FORWARD
        shares = torch.cat(digits(left, cut.right, cut.bits, self.numbers, work.prime), 1)
        inner = left.shape[1]
        out = torch.empty(work.y_shape if forward else work.x_shape, dtype=torch.int32, device=first.device)
        columns = work.op.rows(out)
        largest = [len(cut.meeting(place)) * cut.largest * inner for place in range(cut.places)]
        for block in (work.op.output_blocks if forward else work.op.input_blocks)(work.w_shape):
            weight, axis = (second[block], 1) if forward else (second[:, block], 0)
            parts = digits(weight, cut.left, cut.bits, self.numbers, work.prime, work.near)
            sums = []
            for place in range(cut.places):
                met = cut.meeting(place)
                chosen = [parts[place - other] for other in met]
                stacked = chosen[0] if len(chosen) == 1 else torch.cat(chosen, axis)
                stacked = stacked if forward else stacked.t()
                sums.append(multiply(stacked, shares[:, met.start * inner : met.stop * inner].t()))
            found = field.joined(sums, cut.bits, largest, work.prime)
            columns[:, block] = field.least(*found, work.prime).t()
        return out

    def _outer(self, work: Work, cut: Cut, rows: Tensor, delta: Tensor) -> Tensor:
        out = torch.empty(work.w_shape, dtype=torch.int32, device=rows.device)
        step = min(cut.terms, max(1, len(rows)))
        kind = (cut.bits, self.numbers, work.prime)
        shares = [digits(part, cut.right, *kind) for part in torch.split(rows, step)]
        gradients = [digits(part.t(), cut.left, *kind) for part in torch.split(delta, step)]
        for block in work.op.output_blocks(work.w_shape):
            whole = out[block]
            total = Sum((len(whole), whole.shape[1]), cut, work.prime, rows.device)
            for right, left in zip(shares, gradients, strict=True):
                total.add([each[block] for each in left], right)
            whole.copy_(total.residues())
        return out


_AT_ONCE = 1024  # terms that must fit into a sum before it is reduced
_MOST_PHASES = 64  # of an input gradient: each is a product of its own
_FEW = 3  # products of singles that take less time than one of doubles

DOUBLES = Doubles()
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (DOUBLES, Unfolded(FLOAT64), Singles(), Unfolded(FLOAT32), Unfolded(INT8))
}


def round_up(largest: float) -> float:
    """The least power of two, less one, that is no less. Weights change from step to step: what is known of a shape
    shall hold for the next ones too.
    """
    return float(2 ** int(largest).bit_length() - 1)


def terms_of(work: Work) -> int:
    """An upper bound of the products that make one element of the result of a forward pass or a grad input."""
    first, second, *kernel = work.w_shape
    if (work.kind is Pass.FORWARD) != isinstance(work.op, ConvTranspose):
        return max(1, second * prod(kernel))
    return max(1, first // work.op.groups * prod(kernel)) * most_copies(work.op)


def most_copies(op: BilinearOp) -> int:
    """An upper bound of op.copies (which would allocate): how often padding repeats one element."""
    if not isinstance(op, Conv) or op.padding.mode == "zeros":
        return 1
    if op.padding.mode == "replicate":
        return prod(1 + left + right for left, right in op.padding.amounts)
    return prod(1 + (left > 0) + (right > 0) for left, right in op.padding.amounts)


def _conv_of(op: BilinearOp) -> Conv | None:
    return op.conv if isinstance(op, ConvTranspose) else op if isinstance(op, Conv) else None


def _positions(work: Work) -> Shape:
    """Along each axis: what a weight gradient sums over."""
    return (work.x_shape if isinstance(work.op, ConvTranspose) else work.y_shape)[2:]


def _known(found: T | None) -> T:
    assert found is not None  # `takes` said so
    return found
