"""Sums weighed with random vectors, modulo one or two primes below 2^28.

Residues are those next to zero, of magnitude (prime - 1) / 2 or less, in int32. Weights are integers in float64. Sums
of products stay exact because they are cut into parts: `longest` says how many numbers, and `often` how many residues,
can be weighed and summed within 2^53, what was summed and reduced before included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from darknight.kernels.reference import weigh as blocks_of

Primes = tuple[int, ...]
_PRODUCTS = 256  # of two residues: what an int64 can sum


def entries(words: Tensor, reps: int, lengths: Sequence[int], bits: Sequence[int]) -> list[Tensor]:
    """From uniform int32 words, all lengths of every repetition, the entries of vectors (rep, length) in float64.

    Each is uniform over the integers of so many bits around zero.
    """
    widest = max(bits)
    drawn = words.view(reps, sum(lengths)).bitwise_and((1 << widest) - 1).sub_(1 << (widest - 1))
    parts = torch.split(drawn, list(lengths), dim=1)
    return [(part >> (widest - each)).to(torch.float64) for part, each in zip(parts, bits, strict=True)]


def weigh(values: Tensor, vectors: Tensor, primes: Primes, *, longest: int, groups: int, period: int) -> Tensor:
    """(outer, group * row, column) and (rep, group * row) -> (modulus, outer, group, rep, column): sums over rows.

    `period` outer ones share their weights: with fewer than there are, vectors are (rep, outer / period * group * row).
    """
    outer, rows, columns = values.shape
    if period == outer:
        return _joined(blocks_of(values, vectors, longest, groups), primes)
    apart, length = outer // period, rows // groups
    weights = vectors.reshape(len(vectors), apart, 1, groups, length).permute(1, 2, 3, 0, 4)
    whole = values.reshape(apart, period, groups, length, columns).to(torch.float64)
    parts = range(0, max(1, length), longest)
    sums = [weights[..., at : at + longest] @ whole[..., at : at + longest, :] for at in parts]
    return _joined(torch.stack(sums).reshape(len(sums), outer, groups, len(vectors), columns), primes)


def weigh_rows(values: Tensor, vectors: Tensor, rows: Tensor, primes: Primes, *, longest: int, often: int) -> Tensor:
    """As `weigh`, and weighed with rows (rep, outer) and summed over `outer` too: (modulus, rep, column)."""
    sums = weigh(values, vectors, primes, longest=longest, groups=1, period=len(values))
    turned = sums.squeeze(2).transpose(1, 2).unsqueeze(2)  # (modulus, rep, 1, outer, column)
    return fold(turned, rows.unsqueeze(1), primes, often=often).flatten(2)


def fold(values: Tensor, matrix: Tensor, primes: Primes, *, often: int) -> Tensor:
    """Residues (modulus, rep, outer, n, inner), and (rep, m, n) -> (modulus, rep, outer, m, inner): sums over n."""
    weights, wide = matrix.unsqueeze(1), values.to(torch.float64)
    total = torch.zeros(1, dtype=torch.float64)
    for at in range(0, max(1, values.shape[3]), often):
        total = centred(total + weights[..., at : at + often] @ wide[..., at : at + often, :], primes)
    return residues(total, primes)


def slide(
    values: Tensor,
    weights: Tensor,
    primes: Primes,
    *,
    step: int,
    hole: int,
    skipped: int,
    count: int,
    often: int,
) -> Tensor:
    """Residues (modulus, row, channel, before, size, inner) and (channel, tap) -> the same with `count` for `size`.

    out[p] = sum over taps t of weights[t] * values[p * step + t * hole - skipped], where there is such a value.
    """
    size, taps = values.shape[4], weights.shape[1]
    total = torch.zeros(*values.shape[:4], count, values.shape[5], dtype=torch.float64)
    for tap in range(taps):
        shift = tap * hole - skipped
        first, last = max(0, -(shift // step)), min(count - 1, (size - 1 - shift) // step)
        if first <= last:
            met = values[..., first * step + shift : last * step + shift + 1 : step, :]
            total[..., first : last + 1, :] += met * weights[:, tap].view(-1, 1, 1, 1)
        if (tap + 1) % often == 0:
            total = centred(total, primes)
    return residues(total, primes)


def dot(left: Tensor, right: Tensor, primes: Primes) -> Tensor:
    """Residues (modulus, row, channel, n) twice -> (modulus, channel): products summed over rows and n."""
    moduli = torch.tensor(primes).view(-1, 1, 1)
    total = torch.zeros(*left.shape[:3], dtype=torch.int64)
    for some, others in zip(torch.split(left, _PRODUCTS, 3), torch.split(right, _PRODUCTS, 3), strict=True):
        total += (some.to(torch.int64) * others).sum(3).remainder(moduli)
    return residues(total.sum(1).remainder(moduli.squeeze(2)).to(torch.float64), primes)


def centred(values: Tensor, primes: Primes) -> Tensor:
    """(modulus or 1, ...) within 2^53 -> (modulus, ...): congruent, of magnitude half the prime or a few more."""
    moduli = _like(values, primes)
    return values - (values * moduli.reciprocal()).round_().mul_(moduli)


def residues(values: Tensor, primes: Primes) -> Tensor:
    """(modulus or 1, ...) within 2^53 -> residues (modulus, ...)."""
    moduli, near = _like(values, primes), centred(values, primes)
    near = torch.where(near > moduli / 2, near - moduli, near)
    return torch.where(near < -moduli / 2, near + moduli, near).to(torch.int32)


def _joined(blocks: Tensor, primes: Primes) -> Tensor:
    """(block, ...) within 2^53 -> residues (modulus, ...) of their sums."""
    total = torch.zeros(1, dtype=torch.float64)
    for block in blocks:
        total = total + centred(block.unsqueeze(0), primes)
    return residues(total, primes)


def _like(values: Tensor, primes: Primes) -> Tensor:
    return torch.tensor(primes, dtype=torch.float64).view(-1, *(1,) * (values.dim() - 1))
