"""Freivalds' check, two-sided, of decoded integers in F_p and in a second field F_q.

Both sides of a bilinear identity (see ops.op) are weighed with secret random u and v and compared. What is compared has
one element for each position instead of one for each example, channel and position, so it costs a fraction of the pass.

    wrong modulo p                      somebody lied: IntegrityError
    right modulo p, wrong modulo q      the integer wrapped around modulo p: RangeError, nobody is blamed

Guarantees: a result that differs from the true one in any element passes with probability at most 2^-40, whatever the
    workers did and knew (contract test: tests/integrity/test_freivalds.py). Entries of u and v are uniform over N
    values; a wrong bilinear form vanishes with probability at most 2/N; R repetitions make it (2/N)^R <= 2^-40. The
    same holds for noticing a wrap-around.
Assumes: u and v are fresh, secret and independent of the answers, which were received before they are drawn; operands
    are integers of magnitude at most p/2 (centre residues first); shapes are the caller's, not a worker's.
Leaks: to the worker, that a check failed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.coding import WITNESS
from darknight.errors import IntegrityError, OpError, RangeError
from darknight.ops import BilinearOp, collapse_rows
from darknight.ops.field import EXACT, Bilinear, centred, exact, limbs_for, recombined, residues, split
from darknight.ops.op import Shape
from darknight.randomness import Stream, uniform_below
from darknight.types import Pass

SOUNDNESS_BITS = 40
_WIDEST = 24  # bits of an entry of u or v: 2^24 values are distinct modulo either prime
# Folded weights and sums over folded rows up to here are split into at most six limbs, of at most 21 bits.
_SHARED_WEIGHTS = 2.0**41
_SHARED_REACH = 2.0**46
_FEW_LIMBS = 1 << 17  # products of two centred values that three limbs carry


def verified_forward(
    op: BilinearOp, y: Tensor, x: Tensor, w: Tensor, prime: int, stream: Stream, *, wraps: bool = False
) -> Tensor:
    """y, if it is <w, x>: centred integers y, quantised x and w.

    wraps: the operands are residues, as in a share, and so is the result: it is checked modulo the prime alone.
    """
    rows, weight = op.rows(y), w.to(torch.float64)
    y_shape = op.output_shape(tuple(x.shape), tuple(w.shape))
    _expect(y, y_shape, Pass.FORWARD)
    plan = repetitions(max(rows.shape[0], *op.channels(tuple(w.shape))), prime)
    u = _vectors(stream, plan, op.channels(tuple(w.shape))[0])
    v = _vectors(stream, plan, rows.shape[0])
    folded = _fold_channels(op, rows, u, 1)
    weights, inputs = op.fold_weight_output(weight, u), _fold_rows(op.rows(x), v)
    moduli = _moduli(prime, wraps)
    expected = _projected(weights, inputs, 1, moduli, lambda rows, stack: op.project_forward(rows, stack, y_shape))
    _compare(Pass.FORWARD, moduli, [collapse_rows(centred(folded, m), v) for m in moduli], expected)
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
) -> Tensor:
    """gx, if it is <w, delta>^T: centred integers gx of x_shape, quantised delta and w."""
    _expect(gx, x_shape, Pass.GRAD_INPUT)
    rows, weight = op.rows(gx), w.to(torch.float64)
    _expect(delta, op.output_shape(x_shape, tuple(w.shape)), Pass.GRAD_INPUT)
    plan = repetitions(max(rows.shape[0], *op.channels(tuple(w.shape))), prime)
    u = _vectors(stream, plan, op.channels(tuple(w.shape))[1])
    v = _vectors(stream, plan, rows.shape[0])
    folded = _fold_channels(op, rows, u, 1)
    weights, deltas = op.fold_weight_input(weight, u), _fold_rows(op.rows(delta), v)
    moduli = _moduli(prime, wraps)
    expected = _projected(
        weights, deltas, op.copies(x_shape), moduli, lambda rows, stack: op.project_grad_input(rows, stack, x_shape)
    )
    _compare(Pass.GRAD_INPUT, moduli, [collapse_rows(centred(folded, m), v) for m in moduli], expected)
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
) -> Tensor:
    """gw, if it is <delta, x>: centred integers gw of w_shape, quantised x and delta."""
    _expect(gw, w_shape, Pass.GRAD_WEIGHT)
    _expect(delta, op.output_shape(tuple(x.shape), w_shape), Pass.GRAD_WEIGHT)
    outs, ins = op.channels(w_shape)
    plan = repetitions(max(outs, ins), prime)
    u, v = _vectors(stream, plan, outs), _vectors(stream, plan, ins)
    folded = op.fold_weight_output(gw.to(torch.float64), u)
    inputs = _fold_channels(op, op.rows(x), v, op.groups)
    deltas = _fold_channels(op, op.rows(delta), u, op.groups)
    products = x.shape[0] * op.positions(tuple(x.shape), tuple(delta.shape))
    per_row = max(1, products // max(1, inputs.shape[0]))

    def project(left: Tensor, right: Tensor) -> Tensor:
        return op.project_grad_weight(left, right, w_shape)

    moduli = _moduli(prime, wraps)
    expected = [_summed(project, inputs, deltas, per_row, m) for m in moduli]
    _compare(Pass.GRAD_WEIGHT, moduli, [op.contract_folded(centred(folded, m), v) for m in moduli], expected)
    return gw


@dataclass(frozen=True)
class Repetitions:
    """How often to repeat, with entries of how many bits."""

    count: int
    bits: int

    @property
    def soundness(self) -> int:
        """A wrong result passes with probability at most 2^-soundness."""
        return self.count * (self.bits - 1)


def repetitions(longest: int, prime: int) -> Repetitions:
    """The fewest repetitions for 40 bits whose sums over `longest` field elements stay exact in float64."""
    room = math.log2(EXACT) - (prime // 2 + 8).bit_length() - (max(1, longest) - 1).bit_length()
    bits = min(_WIDEST, int(room) + 1)
    if bits < 2:
        raise OpError(f"a check over {longest} rows or channels is too long to be exact. Use a smaller batch.")
    return Repetitions(-(-SOUNDNESS_BITS // (bits - 1)), bits)


def _moduli(prime: int, wraps: bool) -> tuple[int, ...]:
    return (prime,) if wraps else (prime, WITNESS[prime])


def _projected(
    weights: Tensor, rows: Tensor, copies: int, moduli: Sequence[int], project: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """The cheap side modulo each prime. The folded operands are exact integers, so one product serves both primes."""
    bound, reach = _largest(weights), _largest(rows) * copies * math.prod(weights.shape[1:])
    if bound > _SHARED_WEIGHTS or reach > _SHARED_REACH:  # full-range operands: reduce them for each prime apart

        def apart(left: Tensor, right: Tensor) -> Tensor:
            return project(right, left.unsqueeze(1)).squeeze(1)

        products = float(copies * math.prod(weights.shape[1:]))
        return [
            exact(apart, centred(weights, m), centred(rows, m), bound=_half(m), reach=_half(m) * products, prime=m)
            for m in moduli
        ]
    limbs = limbs_for(bound, reach)
    partials = project(rows, torch.stack(split(weights, limbs), dim=1)).unbind(1)
    return [recombined([centred(partial, m) for partial in partials], limbs, m) for m in moduli]


def _largest(values: Tensor) -> float:
    return max(map(abs, torch.stack(values.aminmax()).tolist())) if values.numel() else 0.0


def _summed(bilinear: Bilinear, left: Tensor, right: Tensor, per_row: int, modulus: int) -> Tensor:
    """bilinear(left, right) mod modulus, summed over chunks of rows that need few limbs."""
    step = max(1, _FEW_LIMBS // per_row)
    total: Tensor | None = None
    for a, b in zip(torch.split(left, step), torch.split(right, step), strict=True):
        reach = _half(modulus) * a.shape[0] * per_row
        part = exact(
            bilinear, centred(a, modulus), centred(b, modulus), bound=_half(modulus), reach=reach, prime=modulus
        )
        total = part if total is None else centred(total + part, modulus)
    assert total is not None
    return total


def _half(modulus: int) -> float:
    """What a centred value is at most."""
    return float(modulus // 2 + 8)


def _compare(kind: Pass, moduli: Sequence[int], found: list[Tensor], expected: list[Tensor]) -> None:
    equal = [
        torch.equal(residues(centred(ours, m), m), residues(theirs, m))
        for ours, theirs, m in zip(found, expected, moduli, strict=True)
    ]
    if not equal[0]:
        raise IntegrityError(
            f"{kind.value}: the result is not the product of its operands. A worker returned a wrong answer.",
            kind=kind.value,
            check="freivalds",
        )
    if not all(equal):
        raise RangeError(
            f"{kind.value}: the result exceeds the field's range. Repeat the pass at a smaller scale.",
            kind=kind.value,
            check="freivalds",
        )


def _vectors(stream: Stream, plan: Repetitions, length: int) -> Tensor:
    """(rep, length), uniform over the 2^bits integers around zero."""
    return uniform_below(stream, (plan.count, length), 1 << plan.bits).sub_(1 << (plan.bits - 1)).to(torch.float64)


_CHUNK = 1 << 19  # elements converted to float64 at a time: they stay in cache between conversion and product


class _Scratch(threading.local):
    """One buffer for conversions, kept: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.buffer = torch.empty(0, dtype=torch.float64)

    def doubles(self, part: Tensor) -> Tensor:
        """`part` in float64; valid until the next call."""
        if self.buffer.numel() < part.numel():
            with torch.inference_mode(False):  # an inference tensor could not be reused outside that mode
                self.buffer = torch.empty(max(_CHUNK, part.numel()), dtype=torch.float64)
        return self.buffer[: part.numel()].view(part.shape).copy_(part)


_scratch = _Scratch()


def _fold_channels(op: BilinearOp, rows: Tensor, vectors: Tensor, groups: int) -> Tensor:
    step = max(1, _CHUNK // max(1, rows[:1].numel()))
    return torch.cat([op.fold_channels(_scratch.doubles(part), vectors, groups) for part in torch.split(rows, step)])


def _fold_rows(rows: Tensor, vectors: Tensor) -> Tensor:
    flat = rows.flatten(1)
    step = max(1, _CHUNK // max(1, flat.shape[0]))
    folded = torch.cat([vectors @ _scratch.doubles(part) for part in torch.split(flat, step, dim=1)], dim=1)
    return folded.view(vectors.shape[0], *rows.shape[1:])


def _expect(tensor: Tensor, shape: Shape, kind: Pass) -> None:
    if tuple(tensor.shape) != shape:
        raise OpError(f"{kind.value}: a tensor {tuple(tensor.shape)} where {shape} belongs.")
