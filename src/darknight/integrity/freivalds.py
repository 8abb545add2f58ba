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
    is none, and it costs nothing. The same holds for noticing a wrap-around. Of a batch in chunks each is checked by
    itself: the first wrong result that is looked at counts, as all checks of the call that follow it are `further`.
Assumes: the vectors are fresh, secret and independent of the answers, which were received before they are drawn (what
    the runtime does about it: tests/runtime/test_check_vectors.py);
    operands are integers of magnitude at most p/2 (centre residues first); shapes are the caller's, not a worker's.
Leaks: to the worker, that a check failed.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from darknight.errors import IntegrityError, OpError, RangeError
from darknight.integrity import sides
from darknight.integrity.vectors import Vectors
from darknight.integrity.weighed import Weighed, moduli_for, weigh, weigh_gradient
from darknight.integrity.weighing import (
    Integers,
    Moduli,
    Rounded,
    Vector,
    inner_product,
    inner_product_of_rows,
    over_channels,
    over_positions,
    over_rows_and_axes,
    over_taps,
    over_weights,
    parts_of,
    total,
)
from darknight.ops import BilinearOp
from darknight.ops.op import Shape
from darknight.randomness import Stream
from darknight.types import Pass

_IN_CACHE = 1 << 18  # residues of a step that are read several times


def verified_forward(
    op: BilinearOp,
    y: Tensor,
    x: Integers,
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
    _expect_result(y, op.output_shape(tuple(x.shape), tuple(w.shape)), Pass.FORWARD)
    weighed = weigh(op, y, prime, stream, wraps=wraps, further=further)
    agree_forward(op, weighed, x, w, prime, wraps=wraps)
    return y


def agree_forward(op: BilinearOp, y: Weighed, x: Integers, w: Tensor, prime: int, *, wraps: bool = False) -> None:
    """The same of a result that was weighed before: raises if it is not <w, x>."""
    w_shape, vectors, moduli = tuple(w.shape), y.vectors, moduli_for(prime, wraps)
    _expect_shape(y.shape, op.output_shape(tuple(x.shape), w_shape), Pass.FORWARD)
    equal = sides.forward(op, y, x, w, moduli)
    if equal is not None:
        _judge(Pass.FORWARD, equal)
        return
    found = over_positions(y.sums, vectors.positions, moduli)
    weights = over_weights(op, w, vectors.u, 0, moduli)
    op, x = _trimmed(op, x, w_shape)
    positions = op.forward_positions(vectors.entries_of_positions, tuple(x.shape), w_shape)
    inputs = over_rows_and_axes(_rows(op, x), vectors.v, positions, moduli, vectors.bits_of_positions(op))
    _compare(Pass.FORWARD, found, inner_product(weights, inputs, moduli))


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
    _expect_result(gx, x_shape, Pass.GRAD_INPUT)
    weighed = weigh(op, gx, prime, stream, wraps=wraps, further=further)
    agree_grad_input(op, weighed, delta, w, prime, wraps=wraps)
    return gx


def agree_grad_input(op: BilinearOp, gx: Weighed, delta: Tensor, w: Tensor, prime: int, *, wraps: bool = False) -> None:
    """The same of a result that was weighed before: raises if it is not <w, delta>^T."""
    w_shape, vectors, moduli = tuple(w.shape), gx.vectors, moduli_for(prime, wraps)
    _expect_shape(tuple(delta.shape), op.output_shape(gx.shape, w_shape), Pass.GRAD_INPUT)
    equal = sides.grad_input(op, gx, delta, w, moduli)
    if equal is not None:
        _judge(Pass.GRAD_INPUT, equal)
        return
    found = over_positions(gx.sums, vectors.positions, moduli)
    weights = over_weights(op, w, vectors.u, 1, moduli)
    positions = op.grad_input_positions(vectors.entries_of_positions, gx.shape, w_shape)
    deltas = over_rows_and_axes(op.rows(delta), vectors.v, positions, moduli, vectors.bits_of_positions(op))
    _compare(Pass.GRAD_INPUT, found, inner_product(weights, deltas, moduli))


def verified_grad_weight(
    op: BilinearOp,
    gw: Tensor,
    x: Integers,
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
    weighed = weigh_gradient(op, gw, prime, stream, wraps=wraps, further=further)
    agree_grad_weight(op, weighed, x, delta, prime, wraps=wraps)
    return gw


def agree_grad_weight(
    op: BilinearOp, gw: Weighed, x: Integers, delta: Tensor, prime: int, *, wraps: bool = False
) -> None:
    """The same of a result that was weighed before, over its output channels: raises if it is not <delta, x>."""
    _expect_shape(tuple(delta.shape), op.output_shape(tuple(x.shape), gw.shape), Pass.GRAD_WEIGHT)
    vectors, moduli = gw.vectors, moduli_for(prime, wraps)
    equal = sides.grad_weight(op, gw, x, delta, moduli)
    if equal is not None:
        _judge(Pass.GRAD_WEIGHT, equal)
        return
    found = _weighed_gradient(gw.sums, vectors, op.groups, moduli)
    _compare(Pass.GRAD_WEIGHT, found, _met_gradient(*_trimmed(op, x, gw.shape), delta, vectors, moduli))


# --- both sides -------------------------------------------------------------------------------------------------------
def _rows(op: BilinearOp, x: Integers) -> Integers:
    return x.replaced(op.rows(x.values)) if isinstance(x, Rounded) else op.rows(x)


def _trimmed(op: BilinearOp, x: Integers, w_shape: Shape) -> tuple[BilinearOp, Integers]:
    if not isinstance(x, Rounded):
        return op.trimmed(x, w_shape)
    op, values = op.trimmed(x.values, w_shape)
    return op, x.replaced(values)


def _weighed_gradient(folded: Tensor, vectors: Vectors, groups: int, moduli: Moduli) -> Tensor:
    """A weight gradient whose output channels are summed, (modulus, rep, in, taps) -> (modulus, group * rep)."""
    count, reps, channels, *taps = folded.shape
    grouped = folded.reshape(count, reps * groups, channels // groups, *taps)
    by_group = [Vector(vectors.v.entries.reshape(reps * groups, -1), vectors.v.bits)]
    for each in vectors.positions:  # every group is weighed alike
        by_group.append(Vector(each.entries.repeat_interleave(groups, 0), each.bits))
    found = over_positions(grouped, by_group, moduli)
    return found.view(count, reps, groups).transpose(1, 2).reshape(count, -1)


def _met_gradient(op: BilinearOp, x: Integers, delta: Tensor, vectors: Vectors, moduli: Moduli) -> Tensor:
    """The cheap side of a weight gradient: (modulus, group * rep)."""
    groups, inputs, deltas = op.groups, _rows(op, x), op.rows(delta)
    taps = [Vector(each.entries.repeat(groups, 1), each.bits) for each in vectors.positions]
    width = len(moduli.primes) * groups * len(vectors.u) * max(prod(inputs.shape[2:]), prod(deltas.shape[2:]))
    step = max(1, _IN_CACHE // max(1, width))
    parts = []
    for some, others in zip(parts_of(inputs, step), parts_of(deltas, step), strict=True):
        left, right = op.fold_taps(
            over_channels(some, vectors.v, groups, moduli).flatten(0, 1),
            over_channels(others, vectors.u, groups, moduli).flatten(0, 1),
            lambda values, along: over_taps(values, taps[along.axis], along, moduli),
        )
        parts.append(inner_product_of_rows(left, right, moduli))
    return total(parts, moduli)


def _compare(kind: Pass, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        _judge(kind, (found == expected).all(1).tolist())


def _judge(kind: Pass, equal: list[bool]) -> None:
    """equal: whether both sides are, by modulus, that of the field first."""
    if not equal[0]:
        _refuse(kind)
    if not all(equal):
        raise RangeError(
            f"{kind.value}: the result exceeds the field's range. Repeat the pass at a smaller scale.",
            kind=kind.value,
            check="freivalds",
        )


def _expect_shape(shape: Shape, needed: Shape, kind: Pass) -> None:
    if shape != needed:
        raise OpError(f"{kind.value}: a tensor {shape} where {needed} belongs.")


def _expect_result(result: Tensor, shape: Shape, kind: Pass) -> None:
    _expect_shape(tuple(result.shape), shape, kind)
    if result.is_floating_point() and not bool(result.isfinite().all()):
        _refuse(kind)


def _refuse(kind: Pass) -> None:
    raise IntegrityError(
        f"{kind.value}: the result is not the product of its operands. A worker returned a wrong answer.",
        kind=kind.value,
        check="freivalds",
    )
