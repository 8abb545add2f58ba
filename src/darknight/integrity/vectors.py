"""The random vectors of Freivalds' check in the field: how many, how long, of how many bits.

Guarantees and assumptions are those of integrity.freivalds, whose arithmetic these numbers are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import log2

import torch
from torch import Tensor

from darknight.integrity.weighing import Vector
from darknight.kernels import residues
from darknight.ops.op import BilinearOp, Shape
from darknight.randomness import Stream
from darknight.types import Pass


@dataclass(frozen=True)
class Repetitions:
    """How often to repeat, with entries of how many bits: u has `bits`, v one more, the others two more."""

    count: int
    bits: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """The bits of an entry of u, of v, and of the vectors over positions."""
        return self.bits, self.bits + 1, self.bits + 2

    @property
    def error(self) -> float:
        """With what probability at most a wrong result passes, with up to three axes of positions."""
        u, v, position = self.widths
        return float((2.0**-u + 2.0**-v + 3 * 2.0**-position) ** self.count)


PLAN = Repetitions(2, 22)
FURTHER = Repetitions(3, 22)  # from the second check of a pass on


def soundness(further: int) -> float:
    """In bits, of a layer call: that any of its three passes is wrong and accepted has probability 2^-soundness.

    further: how many checks there were beyond the first of each pass.
    """
    return -log2(len(Pass) * PLAN.error + further * FURTHER.error)


@dataclass(eq=False, slots=True)
class Vectors:
    """u (rep, channel), v (rep, row or input channel), and (rep, size) for each axis of the positions or taps."""

    u: Vector
    v: Vector
    positions: tuple[Vector, ...]

    @classmethod
    def drawn(cls, stream: Stream, first: int, second: int, sizes: Shape, further: bool) -> Vectors:
        plan = FURTHER if further else PLAN
        u_bits, v_bits, position_bits = plan.widths
        widths = (u_bits, v_bits, *(position_bits,) * len(sizes))
        u, v, *positions = _entries(stream, plan.count, (first, second, *sizes), widths)
        if sizes and min(sizes) < 2:
            positions = [each if size > 1 else _one_for(each) for each, size in zip(positions, sizes, strict=True)]
        return cls(u, v, tuple(positions))

    @property
    def entries_of_positions(self) -> list[Tensor]:
        return [each.entries for each in self.positions]

    def bits_of_positions(self, op: BilinearOp) -> int | None:
        """Of what `op` makes of them for the operands' positions; None if it adds some of them up."""
        return None if op.repeats_positions else max((each.bits for each in self.positions), default=1)


def _one_for(single: Vector) -> Vector:
    """A single position needs no weight: nothing is summed."""
    return Vector(ones(len(single)), single.bits)


@cache
def ones(count: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(count, 1, dtype=torch.float64)


def _entries(stream: Stream, count: int, lengths: Shape, widths: Shape) -> list[Vector]:
    """(count, length) for each length, uniform over the 2^width integers around zero."""
    words = stream.words(count * sum(lengths), torch.int32)
    drawn = residues.entries(words, count, lengths, widths)
    return [Vector(each, width) for each, width in zip(drawn, widths, strict=True)]
