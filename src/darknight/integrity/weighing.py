"""What both sides of Freivalds' check in the field are made of: tensors weighed along their axes, modulo primes.

Axes: `modulus` for each of the primes of `Moduli`, and `rep` for the repetitions. Everything is int32 residues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from darknight.kernels import residues
from darknight.ops import BilinearOp
from darknight.ops.field import EXACT, Limbs, split
from darknight.ops.op import Sliding

# Sums are kept this little below 2^53, because reduction needs the multiple of the prime next to a sum to be exact too.
_SLACK = 1 + 2.0**-24
_WIDEST = 24  # bits of an entry: two of them can be weighed with half a prime and summed
_DIGIT = 16


@dataclass(frozen=True, eq=False)
class Moduli:
    """One or two primes below 2^28, and how many numbers of half their size can be weighed and summed exactly.

    Each is equal to itself alone: they are looked up in every check, and `moduli_for` gives the same ones.
    """

    primes: tuple[int, ...]

    @lru_cache(maxsize=256)  # noqa: B019 - of a few that stay
    def at_once(self, bits: int) -> int:
        """With entries of `bits` bits around zero, on top of one that was reduced before."""
        half = float(max(self.primes) // 2 + 8)
        return int((EXACT / _SLACK - half) // (half * 2.0 ** (bits - 1)))


@dataclass(eq=False, slots=True)
class Vector:
    """(rep, length) random entries of `bits` bits around zero, in float64."""

    entries: Tensor
    bits: int

    def __len__(self) -> int:
        return self.entries.shape[0]


@dataclass(eq=False, slots=True)
class Rounded:
    """The integers round(values * 2^exponent), ties to even, of float32: rounded where they are read."""

    values: Tensor
    exponent: int

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def replaced(self, values: Tensor) -> Rounded:
        return Rounded(values, self.exponent)

    def reshape(self, *shape: int) -> Rounded:
        return self.replaced(self.values.reshape(*shape))


Integers = Tensor | Rounded


def parts_of(rows: Integers, step: int) -> Iterable[Integers]:
    """`step` rows at a time."""
    if step >= rows.shape[0]:
        return [rows]
    if isinstance(rows, Rounded):
        return [rows.replaced(part) for part in torch.split(rows.values, step)]
    return torch.split(rows, step)


def over_channels(rows: Integers, vector: Vector, groups: int, moduli: Moduli) -> Tensor:
    """(row, group * channel, ...) -> (modulus, row, group * rep, ...): sums over channels."""
    count, channels, *sizes = rows.shape
    values = rows.reshape(count, channels, prod(sizes))
    longest = moduli.at_once(vector.bits)
    sums = _weigh(values, vector, moduli, longest, groups)
    return sums.view(len(moduli.primes), count, groups * len(vector), *sizes)


def _weigh(values: Integers, vector: Vector, moduli: Moduli, longest: int, groups: int) -> Tensor:
    values, exponent = (values.values, values.exponent) if isinstance(values, Rounded) else (values, None)
    return residues.weigh(values, vector.entries, moduli.primes, longest=longest, groups=groups, exponent=exponent)


def over_rows(rows: Integers, vector: Vector, moduli: Moduli) -> Tensor:
    """(row, ...) -> (modulus, rep, ...): sums over rows."""
    count, *sizes = rows.shape
    values = rows.reshape(1, count, prod(sizes))
    sums = _weigh(values, vector, moduli, moduli.at_once(vector.bits), 1)
    return sums.view(len(moduli.primes), len(vector), *sizes)


def over_rows_and_axes(
    rows: Integers, vector: Vector, matrices: Sequence[Tensor], moduli: Moduli, bits: int | None = None
) -> Tensor:
    """(row, channel, *size), and (rep, tap, size) for each size -> (modulus, rep, channel, *tap).

    bits: of the matrices, if they are known.
    """
    found = _projected(rows, vector, matrices[0], matrices[1], moduli, bits) if len(matrices) == 2 else None
    if found is None:
        found = over_rows(rows, vector, moduli)
        for axis, matrix in enumerate(matrices, 3):
            found = over_axis(found, axis, matrix, moduli, bits)
    return found


def _projected(
    rows: Integers, vector: Vector, down: Tensor, across: Tensor, moduli: Moduli, bits: int | None
) -> Tensor | None:
    bits = max(_bits(down), _bits(across)) if bits is None else bits
    if bits > _WIDEST:
        return None
    values, exponent = (rows.values, rows.exponent) if isinstance(rows, Rounded) else (rows, None)
    longest, often = moduli.at_once(vector.bits), moduli.at_once(bits)
    return residues.project(
        values, vector.entries, down, across, moduli.primes, longest=longest, often=often, exponent=exponent
    )


def _bits(matrix: Tensor) -> int:
    return int(matrix.abs().max()).bit_length() + 1 if matrix.numel() else 1


def over_both(rows: Tensor, channels: Vector, vector: Vector, moduli: Moduli) -> Tensor:
    """(row, channel, ...) -> (modulus, rep, ...): sums over channels and rows."""
    count, width, *sizes = rows.shape
    sums = residues.weigh_rows(
        rows.reshape(count, width, prod(sizes)),
        channels.entries,
        vector.entries,
        moduli.primes,
        longest=moduli.at_once(channels.bits),
        often=moduli.at_once(vector.bits),
    )
    return sums.view(len(moduli.primes), len(vector), *sizes)


def over_weights(op: BilinearOp, w: Tensor, vector: Vector, axis: int, moduli: Moduli) -> Tensor:
    """w and (rep, channel) -> (modulus, rep, other channel, ...): sums over outputs (axis 0) or inputs (1)."""
    first, second, *taps = w.shape
    groups, count, reps, longest = op.groups, len(moduli.primes), len(vector), moduli.at_once(vector.bits)
    if axis == op.output_axis:
        values = w.reshape(1, first, second * prod(taps))
        sums = residues.weigh(values, vector.entries, moduli.primes, longest=longest, groups=groups)
        return sums.view(count, groups, reps, -1).transpose(1, 2).reshape(count, reps, groups * second, *taps)
    values = w.reshape(first, second, prod(taps))
    period = first // groups
    sums = residues.weigh(values, vector.entries, moduli.primes, longest=longest, period=period)
    return sums.view(count, first, reps, -1).transpose(1, 2).reshape(count, reps, first, *taps)


def over_axis(values: Tensor, axis: int, matrix: Tensor, moduli: Moduli, bits: int | None = None) -> Tensor:
    """(modulus, rep, ..., n, ...) and (rep, m, n) -> (modulus, rep, ..., m, ...): sums along this axis.

    bits: of the matrix, if they are known.
    """
    count, reps, *sizes = values.shape
    before, n, after = sizes[: axis - 2], sizes[axis - 2], sizes[axis - 1 :]
    lines = values.reshape(count, reps, prod(before), n, prod(after))
    return _folded(lines, matrix, moduli, bits).view(count, reps, *before, matrix.shape[1], *after)


def _folded(lines: Tensor, matrix: Tensor, moduli: Moduli, bits: int | None = None) -> Tensor:
    bits = _bits(matrix) if bits is None else bits
    if bits <= _WIDEST:
        return residues.fold(lines, matrix, moduli.primes, often=moduli.at_once(bits))
    # Borders that repeat a position add up its weights: in digits, each of them weighed, and put together again.
    limbs = Limbs(-(-bits // _DIGIT), _DIGIT)
    *lower, total = [_folded(lines, digit, moduli) for digit in split(matrix, limbs)]
    places = torch.tensor([1.0, 2.0**_DIGIT], dtype=torch.float64).expand(len(matrix), 1, 2)
    for digit in reversed(lower):
        pair = torch.stack([digit, total], dim=3)
        total = _folded(pair.flatten(4), places, moduli).view(digit.shape)
    return total


def over_positions(values: Tensor, vectors: Sequence[Vector], moduli: Moduli) -> Tensor:
    """(modulus, rep, size, ...), and a vector for each size -> (modulus, rep): sums over all of them."""
    for vector in vectors:
        values = over_axis(values, 2, vector.entries.unsqueeze(1), moduli, vector.bits).squeeze(2)
    return values


def over_taps(values: Tensor, taps: Vector, along: Sliding, moduli: Moduli) -> Tensor:
    """(modulus * row, channel, ..., size, ...) -> the same with along.count for size: as ops.op.Sliding says."""
    lead, channels, *sizes = values.shape
    before, size, after = sizes[: along.axis], sizes[along.axis], sizes[along.axis + 1 :]
    count = len(moduli.primes)
    lines = values.reshape(count, lead // count, channels, prod(before), size, prod(after))
    sums = residues.slide(
        lines,
        taps.entries,
        moduli.primes,
        step=along.step,
        hole=along.hole,
        skipped=along.skipped,
        count=along.count,
        often=moduli.at_once(taps.bits),
    )
    return sums.view(lead, channels, *before, along.count, *after)


def inner_product(left: Tensor, right: Tensor, moduli: Moduli) -> Tensor:
    """(modulus, rep, ...) twice -> (modulus, rep)."""
    left, right = (each.reshape(each.shape[0], 1, each.shape[1], -1) for each in (left, right))
    return residues.dot(left, right, moduli.primes)


def inner_product_of_rows(left: Tensor, right: Tensor, moduli: Moduli) -> Tensor:
    """(modulus * row, channel, ...) twice -> (modulus, channel)."""
    lead, channels, count = left.shape[0], left.shape[1], len(moduli.primes)
    left, right = (each.reshape(count, lead // count, channels, prod(each.shape[2:])) for each in (left, right))
    return residues.dot(left, right, moduli.primes)


def total(parts: Sequence[Tensor], moduli: Moduli) -> Tensor:
    """(modulus, channel), several of them -> their sum."""
    if len(parts) == 1:
        return parts[0]
    lines = torch.stack(list(parts), dim=1)[:, None, None]  # (modulus, 1, 1, part, channel)
    return _folded(lines, torch.ones(1, 1, len(parts), dtype=torch.float64), moduli).view(parts[0].shape)
