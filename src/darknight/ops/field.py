"""The passes in F_p, exactly, with float64 arithmetic.

A float64 sum of integer products is exact while every partial sum stays within 2^53. Where it might not, one operand is
split into balanced limbs (digits in [-2^(b-1), 2^(b-1)]): half the magnitude of unsigned ones, so four times the length
of contraction, and no bias to accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from darknight.errors import OpError
from darknight.ops.op import BilinearOp, Shape, in_blocks

EXACT = 2.0**53
_SURE = 2.0**50  # up to here the quotient by the prime, rounded three times, is off by less than half of 1 / prime
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
        return least(*_summed(op.forward, left, right, bound=prime // 2, reach=reach, prime=prime), prime)

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
        return least(*_summed(bilinear, left, right, bound=prime // 2, reach=reach, prime=prime), prime)

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
    total: Tensor | None = None
    for x_chunk, delta_chunk in zip(torch.split(x, chunk), torch.split(delta, chunk), strict=True):
        left = centred(x_chunk.to(torch.float64), prime)
        right = centred(delta_chunk.to(torch.float64), prime)
        reach = float(half) * per_example * len(x_chunk)
        if len(x_chunk) == len(x):
            return least(*_summed(bilinear, right, left, bound=half, reach=reach, prime=prime), prime)
        part = exact(bilinear, right, left, bound=half, reach=reach, prime=prime)
        total = part if total is None else centred(total.add_(part), prime)
    assert total is not None  # torch.split gives one part at least
    return residues(total, prime)


def exact(bilinear: Bilinear, left: Tensor, right: Tensor, *, bound: float, reach: float, prime: int) -> Tensor:
    """bilinear(left, right) mod prime, near zero: magnitudes at most prime/2 + 8.

    `bound` is the largest |left|; `reach` bounds the sum of |right| that one element of the result meets.
    """
    return centred(_summed(bilinear, left, right, bound=bound, reach=reach, prime=prime)[0], prime)


def _summed(
    bilinear: Bilinear, left: Tensor, right: Tensor, *, bound: float, reach: float, prime: int
) -> tuple[Tensor, float]:
    """The same before its last reduction, and the largest magnitude that it can have."""
    limbs = limbs_for(bound, reach)
    if limbs.count == 1:
        return bilinear(left, right), bound * reach
    sums = [bilinear(digit, right) for digit in split(left, limbs)]
    return joined(sums, limbs.bits, [limbs.bound * reach] * limbs.count, prime)


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


def joined(sums: Sequence[Tensor], bits: int, largest: Sequence[float], prime: int) -> tuple[Tensor, float]:
    """sum over places of sum * 2^(bits * place) mod prime in float64, the lowest place first; and its bound.

    largest: magnitudes of the sums. Reduced in between only where the next step would not be exact.
    """
    total, bound, near = sums[-1].to(torch.float64), largest[-1], prime / 2 + 8
    own = None  # memory that nobody else reads
    for part, most in zip(reversed(sums[:-1]), reversed(largest[:-1]), strict=True):
        low = part.to(torch.float64)
        if bound * 2.0**bits + most > EXACT:
            total, bound = centred(total, prime), near
            own = total
        if bound * 2.0**bits + most > EXACT:
            low, most = centred(low, prime), near
        total = own = torch.add(low, total, alpha=2.0**bits, out=own)
        bound = bound * 2.0**bits + most
    return total, bound


def centred(values: Tensor, prime: int) -> Tensor:
    """values - prime * round(values / prime) for integers up to 2^53: congruent, magnitude at most prime/2 + 8."""
    quotients = (values * (1.0 / prime)).round_()
    return torch.add(values, quotients, alpha=-prime, out=quotients)


def least(values: Tensor, bound: float, prime: int) -> Tensor:
    """The canonical residues in [0, prime), as int32, of integers up to `bound`, at most 2^53, in magnitude."""
    if bound > _SURE:
        return residues(centred(values, prime), prime)
    # Half a unit more: no quotient is so near a whole number that rounding could take it to the other side.
    quotients = torch.add(_half_unit(prime), values, alpha=1.0 / prime).floor_()
    return torch.add(values, quotients, alpha=-prime, out=quotients).to(torch.int32)


@cache
def _half_unit(prime: int) -> Tensor:
    return torch.tensor(0.5 / prime, dtype=torch.float64)


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
