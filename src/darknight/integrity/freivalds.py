"""Freivalds' check, two-sided, of decoded integers in F_p and in a second field F_q.

Both sides of a bilinear identity (see ops.op) are weighed with secret random vectors along every axis: u over channels,
v over rows (for a weight gradient: over the input channels), and one over each axis of the positions (of the kernel).
So both are one number for each repetition, and the cost is little more than that of reading two tensors once.

    wrong modulo p                      somebody lied: IntegrityError
    right modulo p, wrong modulo q      the integer wrapped around modulo p: RangeError, nobody is blamed

Guarantees: of a layer call's three passes together, a result that differs from the true one in any element passes with
    probability at most 2^-40, whatever the workers did and knew (contract test: tests/integrity/test_freivalds.py). The
    weighed difference is linear in each vector. Entries are uniform over 2^b values, distinct in either field: b = 22
    for u, 23 for v, 24 for the others, of which there are at most three. Vector by vector, a difference that is not
    zero becomes zero with probability at most 2^-b; together 2^-22 + 2^-23 + 3 * 2^-24 = 9 * 2^-24. There are two
    repetitions and three passes: 3 * (9 * 2^-24)^2 < 2^-40. A pass is checked again for every liar that was found and
    every result that left the range, and each time is another chance: a `further` check has three repetitions, so that
    2^18 of them fit into what is left, 3 * (9 * 2^-24)^2 + 2^18 (9 * 2^-24)^3 < 2^-40. While everybody is honest there
    is none, and it costs nothing. The same holds for noticing a wrap-around.
Assumes: the vectors are fresh, secret and independent of the answers, which were received before they are drawn (what
    the runtime does about it: tests/runtime/test_check_vectors.py);
    operands are integers of magnitude at most p/2 (centre residues first); shapes are the caller's, not a worker's.
Leaks: to the worker, that a check failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2, prod

import torch
from torch import Tensor

from darknight.coding import WITNESS
from darknight.errors import IntegrityError, OpError, RangeError
from darknight.integrity.weighing import (
    Moduli,
    Vector,
    inner_product,
    inner_product_of_rows,
    over_axis,
    over_both,
    over_channels,
    over_positions,
    over_rows,
    over_taps,
    over_weights,
    total,
)
from darknight.ops import BilinearOp
from darknight.ops.op import Shape
from darknight.randomness import Stream, uniform_below
from darknight.types import Pass

_IN_CACHE = 1 << 18  # residues of a step that are read several times


def verified_forward(
    op: BilinearOp,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    prime: int,
    stream: Stream,
    *,
    wraps: bool = False,
    further: bool = False,
) -> Tensor:
    """y, if it is <w, x>: centred integers y, quantised x and w.

    wraps: the operands are centred residues, as of a share, and so is the result: it is checked modulo the prime alone.
    further: not the first check in this pass of a layer call.
    """
    w_shape = tuple(w.shape)
    _expect_result(y, op.output_shape(tuple(x.shape), w_shape), Pass.FORWARD)
    rows, moduli = op.rows(y), Moduli(_moduli(prime, wraps))
    vectors = Vectors.drawn(stream, op.channels(w_shape)[0], rows.shape[0], tuple(rows.shape[2:]), further)
    found = over_positions(over_both(rows, vectors.u, vectors.v, moduli), vectors.positions, moduli)
    weights = over_weights(op, w, vectors.u, 0, moduli)
    op, x = op.trimmed(x, w_shape)
    inputs = over_rows(op.rows(x), vectors.v, moduli)
    positions = op.forward_positions(vectors.entries_of_positions, tuple(x.shape), w_shape)
    _compare(Pass.FORWARD, found, _met(weights, inputs, positions, moduli))
    return y


def verified_grad_input(
    op: BilinearOp,
    gx: Tensor,
    delta: Tensor,
    w: Tensor,
    x_shape: Shape,
    prime: int,
    stream: Stream,
    *,
    wraps: bool = False,
    further: bool = False,
) -> Tensor:
    """gx, if it is <w, delta>^T: centred integers gx of x_shape, quantised delta and w."""
    w_shape = tuple(w.shape)
    _expect_result(gx, x_shape, Pass.GRAD_INPUT)
    _expect(delta, op.output_shape(x_shape, w_shape), Pass.GRAD_INPUT)
    rows, moduli = op.rows(gx), Moduli(_moduli(prime, wraps))
    vectors = Vectors.drawn(stream, op.channels(w_shape)[1], rows.shape[0], tuple(rows.shape[2:]), further)
    found = over_positions(over_both(rows, vectors.u, vectors.v, moduli), vectors.positions, moduli)
    weights = over_weights(op, w, vectors.u, 1, moduli)
    deltas = over_rows(op.rows(delta), vectors.v, moduli)
    positions = op.grad_input_positions(vectors.entries_of_positions, x_shape, w_shape)
    _compare(Pass.GRAD_INPUT, found, _met(weights, deltas, positions, moduli))
    return gx


def verified_grad_weight(
    op: BilinearOp,
    gw: Tensor,
    x: Tensor,
    delta: Tensor,
    w_shape: Shape,
    prime: int,
    stream: Stream,
    *,
    wraps: bool = False,
    further: bool = False,
) -> Tensor:
    """gw, if it is <delta, x>: centred integers gw of w_shape, quantised x and delta."""
    _expect_result(gw, w_shape, Pass.GRAD_WEIGHT)
    _expect(delta, op.output_shape(tuple(x.shape), w_shape), Pass.GRAD_WEIGHT)
    (outs, ins), moduli = op.channels(w_shape), Moduli(_moduli(prime, wraps))
    vectors = Vectors.drawn(stream, outs, ins, w_shape[2:], further)
    found = _weighed_gradient(over_weights(op, gw, vectors.u, 0, moduli), vectors, op.groups, moduli)
    _compare(Pass.GRAD_WEIGHT, found, _met_gradient(*op.trimmed(x, w_shape), delta, vectors, moduli))
    return gw


# --- the vectors ------------------------------------------------------------------------------------------------------
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


@dataclass(frozen=True, eq=False)
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
        return cls(u, v, tuple(each if each.entries.shape[1] > 1 else _one_for(each) for each in positions))

    @property
    def entries_of_positions(self) -> list[Tensor]:
        return [each.entries for each in self.positions]


def _one_for(single: Vector) -> Vector:
    """A single position needs no weight: nothing is summed."""
    return Vector(torch.ones_like(single.entries), single.bits)


def _entries(stream: Stream, count: int, lengths: Shape, widths: Shape) -> list[Vector]:
    """(count, length) for each length, uniform over the 2^width integers around zero."""
    widest = max(widths)
    drawn = uniform_below(stream, (count, sum(lengths)), 1 << widest).sub_(1 << (widest - 1))
    entries = (drawn >> _shifts(lengths, tuple(widest - width for width in widths))).to(torch.float64)
    parts = torch.split(entries, list(lengths), dim=1)
    return [Vector(part, width) for part, width in zip(parts, widths, strict=True)]


@lru_cache(maxsize=1024)
def _shifts(lengths: Shape, bits: Shape) -> Tensor:
    """`length` times each number of bits. (Sizes of layers are no secret.)"""
    with torch.inference_mode(False):
        return torch.repeat_interleave(torch.tensor(bits), torch.tensor(lengths))


def _moduli(prime: int, wraps: bool) -> tuple[int, ...]:
    return (prime,) if wraps else (prime, WITNESS[prime])


# --- both sides -------------------------------------------------------------------------------------------------------
def _met(weights: Tensor, rows: Tensor, positions: Sequence[Tensor], moduli: Moduli) -> Tensor:
    """The cheap side: weights (modulus, rep, channel, taps), rows (modulus, rep, channel, sizes) -> (modulus, rep).

    positions: for each axis (rep, taps, size).
    """
    for axis, matrix in enumerate(positions, 3):
        rows = over_axis(rows, axis, matrix, moduli)
    return inner_product(weights, rows, moduli)


def _weighed_gradient(folded: Tensor, vectors: Vectors, groups: int, moduli: Moduli) -> Tensor:
    """A weight gradient whose output channels are summed, (modulus, rep, in, taps) -> (modulus, group * rep)."""
    count, reps, channels, *taps = folded.shape
    grouped = folded.reshape(count, reps * groups, channels // groups, *taps)
    by_group = [Vector(vectors.v.entries.reshape(reps * groups, -1), vectors.v.bits)]
    for each in vectors.positions:  # every group is weighed alike
        by_group.append(Vector(each.entries.repeat_interleave(groups, 0), each.bits))
    found = over_positions(grouped, by_group, moduli)
    return found.view(count, reps, groups).transpose(1, 2).reshape(count, -1)


def _met_gradient(op: BilinearOp, x: Tensor, delta: Tensor, vectors: Vectors, moduli: Moduli) -> Tensor:
    """The cheap side of a weight gradient: (modulus, group * rep)."""
    groups, inputs, deltas = op.groups, op.rows(x), op.rows(delta)
    taps = [Vector(each.entries.repeat(groups, 1), each.bits) for each in vectors.positions]
    width = len(moduli.primes) * groups * len(vectors.u) * max(prod(inputs.shape[2:]), prod(deltas.shape[2:]))
    step = max(1, _IN_CACHE // max(1, width))
    parts = []
    for some, others in zip(torch.split(inputs, step), torch.split(deltas, step), strict=True):
        left, right = op.fold_taps(
            over_channels(some, vectors.v, groups, moduli).flatten(0, 1),
            over_channels(others, vectors.u, groups, moduli).flatten(0, 1),
            lambda values, along: over_taps(values, taps[along.axis], along, moduli),
        )
        parts.append(inner_product_of_rows(left, right, moduli))
    return total(parts, moduli)


def _compare(kind: Pass, found: Tensor, expected: Tensor) -> None:
    equal = (found == expected).all(1).tolist()
    if not equal[0]:
        _refuse(kind)
    if not all(equal):
        raise RangeError(
            f"{kind.value}: the result exceeds the field's range. Repeat the pass at a smaller scale.",
            kind=kind.value,
            check="freivalds",
        )


def _expect(tensor: Tensor, shape: Shape, kind: Pass) -> None:
    if tuple(tensor.shape) != shape:
        raise OpError(f"{kind.value}: a tensor {tuple(tensor.shape)} where {shape} belongs.")


def _expect_result(result: Tensor, shape: Shape, kind: Pass) -> None:
    _expect(result, shape, kind)
    if result.is_floating_point() and not bool(result.isfinite().all()):
        _refuse(kind)


def _refuse(kind: Pass) -> None:
    raise IntegrityError(
        f"{kind.value}: the result is not the product of its operands. A worker returned a wrong answer.",
        kind=kind.value,
        check="freivalds",
    )
