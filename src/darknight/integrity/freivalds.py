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
from math import log2, prod

import numpy as np
import torch
from torch import Tensor

from darknight.coding import WITNESS
from darknight.errors import IntegrityError, OpError, RangeError
from darknight.integrity.weighing import (
    Integers,
    Moduli,
    block_length,
    contracted,
    contracted_again,
    inner_product,
    inner_product_of_rows,
    integers,
    joined,
    largest_of,
    over_channels,
    over_rows,
    over_weights,
)
from darknight.ops import BilinearOp
from darknight.ops.op import Shape
from darknight.randomness import Stream, uniform_below
from darknight.types import Pass

_IN_CACHE = 1 << 19  # float64 elements of a step that are read several times


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
    found = _weighed(op, rows, vectors, moduli)
    weights = over_weights(op, w, vectors.u, 0, vectors.channels_at_once(moduli), moduli)
    op, x = op.trimmed(x, w_shape)
    inputs = over_rows(op.rows(x), vectors.v, vectors.rows_at_once(moduli))
    expected = _met(weights, inputs, op.forward_positions(vectors.positions, tuple(x.shape), w_shape), moduli)
    _compare(Pass.FORWARD, moduli, found, expected)
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
    found = _weighed(op, rows, vectors, moduli)
    weights = over_weights(op, w, vectors.u, 1, vectors.channels_at_once(moduli), moduli)
    deltas = over_rows(op.rows(delta), vectors.v, vectors.rows_at_once(moduli))
    expected = _met(weights, deltas, op.grad_input_positions(vectors.positions, x_shape, w_shape), moduli)
    _compare(Pass.GRAD_INPUT, moduli, found, expected)
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
    groups, (outs, ins), moduli = op.groups, op.channels(w_shape), Moduli(_moduli(prime, wraps))
    vectors = Vectors.drawn(stream, outs, ins, w_shape[2:], further)
    folded = over_weights(op, gw, vectors.u, 0, vectors.channels_at_once(moduli), moduli)
    found = _weighed_gradient(folded, vectors, groups, moduli)
    _compare(Pass.GRAD_WEIGHT, moduli, found, _met_gradient(*op.trimmed(x, w_shape), delta, vectors, moduli))
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

    plan: Repetitions
    u: Tensor
    v: Tensor
    positions: tuple[Tensor, ...]

    @classmethod
    def drawn(cls, stream: Stream, first: int, second: int, sizes: Shape, further: bool) -> Vectors:
        plan = FURTHER if further else PLAN
        u_bits, v_bits, position_bits = plan.widths
        widths = (u_bits, v_bits, *(position_bits,) * len(sizes))
        u, v, *positions = _entries(stream, plan.count, (first, second, *sizes), widths)
        # A single position needs no weight: nothing is summed.
        return cls(plan, u, v, tuple(each if each.shape[1] > 1 else torch.ones_like(each) for each in positions))

    def positions_of_groups(self, groups: int) -> list[Tensor]:
        """(group * rep, taps) for each axis: every group is weighed alike."""
        return [each.repeat(groups, 1) for each in self.positions] if groups > 1 else list(self.positions)

    # How many operands of magnitude p/2 can be weighed with u, v, or the others, and summed exactly.
    def channels_at_once(self, moduli: Moduli) -> int:
        return self._at_once(0, moduli)

    def rows_at_once(self, moduli: Moduli) -> int:
        return self._at_once(1, moduli)

    def taps_at_once(self, moduli: Moduli) -> int:
        return self._at_once(2, moduli)

    def _at_once(self, which: int, moduli: Moduli) -> int:
        return block_length(moduli.half, 2.0 ** (self.plan.widths[which] - 1))


def _entries(stream: Stream, count: int, lengths: Shape, widths: Shape) -> list[Tensor]:
    """(count, length) for each length, uniform over the 2^width integers around zero, in float64."""
    widest = max(widths)
    drawn = uniform_below(stream, (count, sum(lengths)), 1 << widest).sub_(1 << (widest - 1))
    parts = torch.split(drawn, list(lengths), dim=1)
    return [(part >> (widest - width)).to(torch.float64) for part, width in zip(parts, widths, strict=True)]


def _moduli(prime: int, wraps: bool) -> tuple[int, ...]:
    return (prime,) if wraps else (prime, WITNESS[prime])


# --- both sides -------------------------------------------------------------------------------------------------------
def _weighed(op: BilinearOp, rows: Tensor, vectors: Vectors, moduli: Moduli) -> Integers:
    """A result (row, channel, ...) weighed along every axis: (modulus, rep)."""
    folded = over_channels(rows, vectors.u, 1, vectors.channels_at_once(moduli))  # (block, row, rep, ...)
    columns = folded.reshape(*folded.shape[:3], prod(rows.shape[2:])).transpose(1, 2)  # (block, rep, row, position)
    total = contracted(vectors.v.unsqueeze(1), columns, moduli, largest_of(folded))
    return _over_positions(total.reshape(*total.shape[:2], *rows.shape[2:]), vectors.positions, moduli)


def _weighed_gradient(folded: Integers, vectors: Vectors, groups: int, moduli: Moduli) -> Integers:
    """A weight gradient whose output channels are summed, (modulus, rep, in, ...) -> (modulus, group * rep)."""
    _, reps, channels, *sizes = folded.shape
    grouped = folded.reshape(len(moduli), reps, groups, channels // groups, -1)
    total = contracted_again(integers(vectors.v).reshape(reps, groups, 1, -1), grouped, moduli)
    taps = total.swapaxes(1, 2).reshape(len(moduli), groups * reps, *sizes)
    return _over_positions(taps, vectors.positions_of_groups(groups), moduli)


def _over_positions(total: Integers, positions: Sequence[Tensor], moduli: Moduli) -> Integers:
    """(modulus, rep, ...), centred, and (rep, size) for each further axis -> (modulus, rep)."""
    for weights in reversed(positions):
        lines = total.reshape(*total.shape[:2], -1, total.shape[-1]).swapaxes(2, 3)  # (modulus, rep, size, any)
        total = contracted_again(integers(weights)[:, np.newaxis], lines, moduli).reshape(total.shape[:-1])
    return total


def _met(weights: Integers, rows: Tensor, positions: Sequence[Tensor], moduli: Moduli) -> Integers:
    """The cheap side: weights (modulus, rep, channel, ...), rows (block, rep, channel, ...) -> (modulus, rep).

    positions: for each axis (rep, taps, size).
    """
    lead = weights.shape[:2]
    if not positions:
        met = joined(rows, moduli).astype(np.int64)
    else:
        lines = rows.reshape(*rows.shape[:2], -1, rows.shape[-1]).transpose(2, 3)  # (block, rep, size, any)
        met = contracted(positions[-1], lines, moduli, largest_of(rows))
        for matrix, size in zip(positions[-2::-1], rows.shape[-2:2:-1], strict=True):
            met = contracted_again(integers(matrix), met.reshape(*lead, -1, size).swapaxes(2, 3), moduli)
    # Now (modulus, rep, taps, channel), the axes of the taps in the kernel's order.
    return inner_product(np.moveaxis(weights, 2, -1).reshape(*lead, -1), met.reshape(*lead, -1), moduli)


def _met_gradient(op: BilinearOp, x: Tensor, delta: Tensor, vectors: Vectors, moduli: Moduli) -> Integers:
    """The cheap side of a weight gradient: (modulus, group * rep)."""
    groups, inputs, deltas = op.groups, op.rows(x), op.rows(delta)
    taps = vectors.positions_of_groups(groups)
    width = len(moduli) * groups * len(vectors.u) * max(prod(inputs.shape[2:]), prod(deltas.shape[2:]))
    step = max(1, _IN_CACHE // max(1, width))
    total = np.zeros((len(moduli), groups * len(vectors.u)), dtype=np.int64)
    for some, others in zip(torch.split(inputs, step), torch.split(deltas, step), strict=True):
        left = joined(over_channels(some, vectors.v, groups, vectors.rows_at_once(moduli)), moduli)
        right = joined(over_channels(others, vectors.u, groups, vectors.channels_at_once(moduli)), moduli)
        folded = op.fold_taps(
            torch.from_numpy(left).flatten(0, 1),
            torch.from_numpy(right).flatten(0, 1),
            taps,
            moduli.centred_rows,
            vectors.taps_at_once(moduli),
        )
        total += inner_product_of_rows(*folded, moduli)
    return total


def _compare(kind: Pass, moduli: Moduli, found: Integers, expected: Integers) -> None:
    equal = (moduli.residues(found - expected) == 0).all(1).tolist()
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
