"""The passes in F_p, exactly, with float64 arithmetic.

A float64 sum of integer products is exact while every partial sum stays within 2^53. Where it might not, one operand is
split into balanced limbs (digits in [-2^(b-1), 2^(b-1)]): half the magnitude of unsigned ones, so four times the length
of contraction, and no bias to accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.errors import OpError
from darknight.ops.op import BilinearOp, Shape, in_blocks

EXACT = 2.0**53
_MOST_LIMBS = 6

Bilinear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Limbs:
    """How many digits, of how many bits."""

    count: int
    bits: int

    @property
    def bound(self) -> float:
        return 2.0 ** (self.bits - 1)


def forward(op: BilinearOp, x: Tensor, w: Tensor, prime: int) -> Tensor:
    """y mod prime in [0, prime), int32; x holds residues, w any integers of magnitude below prime."""
    y_shape = op.output_shape(tuple(x.shape), tuple(w.shape))  # before fan_in, which takes fitting shapes for granted
    left = centred(x.to(torch.float64), prime)

    def part(block: slice) -> Tensor:
        right = w[block].to(torch.float64)
        reach = op.fan_in(right, tuple(x.shape))
        return residues(exact(op.forward, left, right, bound=prime // 2, reach=reach, prime=prime), prime)

    return in_blocks(op.output_blocks(tuple(w.shape)), -1, y_shape, part)


def grad_input(op: BilinearOp, delta: Tensor, w: Tensor, x_shape: Shape, prime: int) -> Tensor:
    """gx mod prime in [0, prime), int32; delta holds residues, w any integers of magnitude below prime."""
    op.output_shape(x_shape, tuple(w.shape))
    left = centred(delta.to(torch.float64), prime)

    def part(block: slice) -> Tensor:
        right = w[:, block].to(torch.float64)
        shape = x_shape if block == slice(None) else (*x_shape[:-1], right.shape[1])

        def bilinear(left: Tensor, right: Tensor) -> Tensor:
            return op.grad_input(left, right, shape)

        reach = op.fan_out(right, shape)
        return residues(exact(bilinear, left, right, bound=prime // 2, reach=reach, prime=prime), prime)

    return in_blocks(op.input_blocks(tuple(w.shape)), -1, x_shape, part)


def grad_weight(op: BilinearOp, x: Tensor, delta: Tensor, w_shape: Shape, prime: int) -> Tensor:
    """gw mod prime in [0, prime), int32; x and delta hold residues. Cut into chunks of examples that stay exact."""

    def part(block: slice) -> Tensor:
        if block == slice(None):
            return _grad_weight(op, x, delta, w_shape, prime)
        rows = delta[..., block]
        return _grad_weight(op, x, rows, (rows.shape[-1], *w_shape[1:]), prime)

    return in_blocks(op.output_blocks(w_shape), 0, w_shape, part)


def _grad_weight(op: BilinearOp, x: Tensor, delta: Tensor, w_shape: Shape, prime: int) -> Tensor:
    def bilinear(right: Tensor, left: Tensor) -> Tensor:
        return op.grad_weight(left, right, w_shape)

    per_example = max(1, op.positions(tuple(x.shape), tuple(delta.shape)))
    half = prime // 2
    limbs = limbs_for(half, float(half) * per_example, least=2)
    chunk = int(EXACT // (limbs.bound * half * per_example))
    total = torch.zeros(w_shape, dtype=torch.float64, device=x.device)
    for x_chunk, delta_chunk in zip(torch.split(x, chunk), torch.split(delta, chunk), strict=True):
        left = centred(x_chunk.to(torch.float64), prime)
        right = centred(delta_chunk.to(torch.float64), prime)
        reach = float(half) * per_example * len(x_chunk)
        total += exact(bilinear, right, left, bound=half, reach=reach, prime=prime)
        total = centred(total, prime)
    return residues(total, prime)


def exact(bilinear: Bilinear, left: Tensor, right: Tensor, *, bound: float, reach: float, prime: int) -> Tensor:
    """bilinear(left, right) mod prime, near zero: magnitudes at most prime/2 + 8.

    `bound` is the largest |left|; `reach` bounds the sum of |right| that one element of the result meets.
    """
    limbs = limbs_for(bound, reach)
    if limbs.count == 1:
        return centred(bilinear(left, right), prime)
    return recombined([centred(bilinear(digit, right), prime) for digit in split(left, limbs)], limbs, prime)


def limbs_for(bound: float, reach: float, least: int = 1) -> Limbs:
    """The fewest balanced limbs, at least `least`, of values up to `bound` whose sums over `reach` stay exact."""
    if least == 1 and bound * reach <= EXACT:
        return Limbs(1, 1)
    width = int(bound).bit_length() + 1
    for count in range(2, _MOST_LIMBS + 1):
        limbs = Limbs(count, -(-width // count))
        if limbs.bound * reach <= EXACT:
            return limbs
    raise OpError(
        f"a contraction that reaches {reach:.3g} is too long for exact float64 arithmetic. Use a smaller batch."
    )


def split(values: Tensor, limbs: Limbs) -> list[Tensor]:
    """Balanced digits, lowest first: values = sum of digit_i * 2^(bits * i)."""
    base = 2.0**limbs.bits
    digits = []
    rest = values
    for _ in range(limbs.count - 1):
        upper = (rest / base).round_()
        digits.append(rest - upper * base)
        rest = upper
    return [*digits, rest]


def recombined(partials: list[Tensor], limbs: Limbs, prime: int) -> Tensor:
    """sum of partial_i * 2^(bits * i) mod prime, near zero; the inverse of `split` for small partials, lowest first."""
    total = partials[-1]
    for partial in reversed(partials[:-1]):
        total = centred(total * 2.0**limbs.bits + partial, prime)
    return total


def centred(values: Tensor, prime: int) -> Tensor:
    """values - prime * round(values / prime) for integers up to 2^53: congruent, magnitude at most prime/2 + 8."""
    return (values * (1.0 / prime)).round_().mul_(-prime).add_(values)


def residues(values: Tensor, prime: int) -> Tensor:
    """The canonical residues in [0, prime) of values above -prime and below prime, as int32."""
    found = values.to(torch.int32)
    return found.add_(found.bitwise_right_shift(31).bitwise_and_(prime))  # the shift is -1 for what is negative


def combine_clear(row: Sequence[int], groups: Tensor, prime: int) -> Tensor:
    """sum_i beta_ji delta_i mod prime in [0, prime): the worker's part of Eq. 4 with gradients in the clear.

    groups: residues (group, input, *feature).
    """
    total = torch.zeros_like(groups[:, 0], dtype=torch.int64)
    for coefficient, deltas in zip(row, groups.unbind(1), strict=True):
        total.add_(deltas, alpha=coefficient % prime).remainder_(prime)
    return total.to(torch.int32)
