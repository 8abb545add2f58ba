"""Linear combinations modulo a prime, fixed-point rounding, and weighed sums."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# A coefficient and a residue are both below 2^28, so a product is below 2^56 and this many of them fit an int64.
_TERMS_BETWEEN_REDUCTIONS = 64
_FLOAT32_EXPONENTS = 90
_ALL = (1 << 32) - 1
_CHUNK = 1 << 20  # elements converted to float64 at a time: they stay in cache between conversion and product


def combine(
    matrix: Sequence[Sequence[int]], sources: Sequence[Tensor], prime: int, *, out: Tensor, centred: bool
) -> Tensor:
    """out[row] = sum over source of matrix[row][source] * sources[source]  (mod prime).

    Sources are integer tensors with magnitudes below 2^28; so are the coefficients. With `centred` results lie in
    [-(prime-1)/2, (prime-1)/2], otherwise in [0, prime). Zero coefficients cost nothing, so the systematic code is
    encoded and decoded with additions alone.
    """
    half = prime // 2 if centred else 0
    for row, target in zip(matrix, out, strict=True):
        total = torch.zeros(target.shape, dtype=torch.int64)
        terms = 0
        for coefficient, source in zip(row, sources, strict=True):
            if coefficient:
                if terms == _TERMS_BETWEEN_REDUCTIONS:
                    total.remainder_(prime)
                    terms = 1
                total.add_(source, alpha=coefficient)
                terms += 1
        target.copy_(total.add_(half).remainder_(prime).sub_(half))
    return out


@dataclass(frozen=True)
class Rounding:
    """Words for stochastic rounding that nobody has to write down: those of `rounding_words`."""

    key: int
    other: int
    first: int = 0

    def after(self, count: int) -> Rounding:
        """Without the first `count` of them."""
        return Rounding(self.key, self.other, self.first + count)


def encode(
    values: Tensor,
    exponent: int,
    rounding: Rounding | None,
    matrix: Sequence[Sequence[int]],
    noise: Tensor,
    prime: int,
    *,
    inputs: int,
    outs: Sequence[Tensor | None],
) -> Tensor:
    """Quantises values (example, ...), and masks them in groups of `inputs` with noise (noise row, group, ...).

    outs: (group, ...) for each row of the matrix (worker, input and noise row), in [0, prime); None where nobody wants
    it. rounding: None for the nearest; else with its words, one for each value. Examples that are missing in the last
    group are zeros. Returns the quantised values.
    """
    if rounding is None:
        quantised = quantise_nearest(values, exponent)
    else:
        words = rounding_words(values.numel(), rounding).view(values.shape)
        quantised = quantise_stochastic(values, exponent, words)
    examples, groups = len(quantised), noise.shape[1]
    padding = quantised.new_zeros(groups * inputs - examples, *quantised.shape[1:])
    whole = torch.cat([quantised, padding]) if len(padding) else quantised
    sources = [*whole.reshape(groups, inputs, *whole.shape[1:]).unbind(1), *noise]
    for row, out in zip(matrix, outs, strict=True):
        if out is not None:
            combine([row], sources, prime, out=out.unsqueeze(0), centred=False)
    return quantised


def unmask(
    matrix: Sequence[Sequence[int]],
    sources: Sequence[Tensor],
    prime: int,
    exponent: int,
    *,
    out: Tensor,
    floats: Tensor,
) -> list[int]:
    """Centred combinations of residues into `out`, and times 2^-exponent into `floats`, float32.

    Returns the places of sources that have numbers outside [0, prime): if there are any, the results mean nothing.

    Guarantees: a source may be memory that somebody else writes to meanwhile. It is read once, into memory of this
        process, and what was read is what is looked at and what is combined (contract test:
        tests/kernels/test_read_once.py).
    """
    read = [source.clone() for source in sources]
    outside = [place for place, source in enumerate(read) if not are_residues(source, prime)]
    if not outside:
        combine(matrix, read, prime, out=out, centred=True)
        floats.copy_(dequantise(out, exponent, torch.float32))
    return outside


def are_residues(source: Tensor, prime: int) -> bool:
    """Whether all numbers are in [0, prime)."""
    if not source.numel():
        return True
    least, most = torch.aminmax(source)
    return int(least) >= 0 and int(most) < prime


def quantise_nearest(values: Tensor, exponent: int) -> Tensor:
    """round(values * 2^exponent), ties to even, as int32."""
    return values.mul(2.0**exponent).round_().to(torch.int32)


def quantise_stochastic(values: Tensor, exponent: int, words: Tensor) -> Tensor:
    """Down or up to an integer, up where u < the fraction of values * 2^exponent: unbiased for uniform u, as int32.

    u is made of the lower 24 bits of a random word, as a fraction of 2^24.
    """
    scaled = values.mul(2.0**exponent)
    lower = scaled.floor()
    uniforms = words.bitwise_and((1 << 24) - 1).to(torch.float32).mul_(2.0**-24)
    return lower.add_(uniforms < scaled.sub_(lower)).to(torch.int32)


def rounding_words(count: int, rounding: Rounding) -> Tensor:
    """int32 for quantise_stochastic: what a bijection of 32 bits, which two keys of 32 bits choose, makes of the
    numbers from `rounding.first` on.

    Beyond 2^32 they repeat. They are to be uniform; nobody has to be unable to tell them from random ones.
    """
    first = rounding.first % (_ALL + 1)
    word = torch.arange(first, first + count).mul_(0x9E3779B9).add_(rounding.key).bitwise_and_(_ALL)
    for shift, factor, mixed in ((16, 0x21F0AAAD, rounding.other), (15, 0xD35A2D97, 0)):
        word = word.bitwise_xor_(word >> shift).mul_(factor).bitwise_and_(_ALL).bitwise_xor_(mixed)
    return word.bitwise_xor_(word >> 15).to(torch.int32)


def largest_magnitude(values: Tensor) -> float:
    """max |value|; infinite or NaN if a value is."""
    return max(float(value.abs()) for value in values.aminmax()) if values.numel() else 0.0


def unchanged(values: Tensor, exponent: int, quantised: Tensor) -> float:
    """largest_magnitude(values), if they are still quantised to `quantised`; else infinity."""
    same = values.shape == quantised.shape and bool(quantise_nearest(values, exponent).equal(quantised))
    return largest_magnitude(values) if same else math.inf


@dataclass(frozen=True, eq=False)
class Requantised:
    """Integers of new weights; the largest magnitude of what they were; their moments; and those before, as int16."""

    integers: Tensor
    largest: float
    moments: tuple[Tensor, Tensor] | None
    earlier: Tensor | None


def requantise(
    values: Tensor, exponent: int, bits: int, *, counted: bool, earlier: Tensor | None
) -> Requantised | None:
    """quantise_nearest of (row, channel, ...), and all that a step needs of it.

    counted: with the moments of (row, channel, rest). earlier: integers of `bits` bits, and of the same shape. None if
    a magnitude has more bits at this scale, or is no number: then another scale is the right one, if any is.
    """
    largest = largest_magnitude(values)
    if not largest * 2.0**exponent < 2.0**bits:
        return None
    integers = quantise_nearest(values, exponent)
    rest = math.prod(values.shape[2:])
    found = moments(integers.reshape(*values.shape[:2], rest), 0) if counted else None
    return Requantised(integers, largest, found, None if earlier is None else earlier.to(torch.int16))


def cut_words(words: Tensor, mask: int, last: int) -> Tensor:
    """Cuts words to the bits of `mask` in place; returns the places, in order, of those that are still above `last`."""
    return (words.bitwise_and_(mask) > last).nonzero().squeeze(1)


def dequantise(integers: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """integers * 2^-exponent; one rounding to float32 or float64, and one more to a narrower dtype."""
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32  # integers could leave a narrower one
    if abs(exponent) > _FLOAT32_EXPONENTS:  # the scale itself would leave float32
        wide = torch.float64
    return integers.to(wide).mul_(2.0**-exponent).to(dtype)


# --- sums over what was quantised -------------------------------------------------------------------------------------
CHECKSUM_TILE = 1024
_COUNTED = 2.0**12


def moments(values: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """(outer, channel, inner) -> by outer and by channel, the sum and the sum of squares: (outer, 2), (channel, 2).

    Of round(values * 2^exponent), or of integers as they are; of magnitudes up to 2^12. Exact, in int64.
    """
    integers = (quantise_nearest(values, exponent) if values.is_floating_point() else values).to(torch.int64)
    squares = integers.square()
    rows, columns = (torch.stack([integers.sum(axes), squares.sum(axes)], dim=1) for axes in ((1, 2), (0, 2)))
    return rows, columns


def survey(values: Tensor, exponent: int) -> tuple[float, tuple[Tensor, Tensor] | None]:
    """largest_magnitude(values), of floats, and their moments; none if they have none at this scale."""
    largest = largest_magnitude(values)
    return largest, moments(values, exponent) if countable(largest, exponent) else None


def countable(largest: float, exponent: int) -> bool:
    """Whether `moments` are for values up to this magnitude; never, if it is no number."""
    return largest * 2.0**exponent <= _COUNTED


def checksum(quantised: Tensor) -> int:
    """int32 (row, ...) -> 64 bits that change with every value and its place; against accidents, not against anybody.

    A row is cut into tiles of 1024. The sum over rows, tiles and places of (2 row + 1) (2 tile + 1) (weight * value
    modulo 2^32), modulo 2^64.
    """
    total = 0
    for number, row in enumerate(quantised.flatten(1)):
        tiles = torch.nn.functional.pad(row.to(torch.int64), (0, -len(row) % CHECKSUM_TILE)).view(-1, CHECKSUM_TILE)
        sums = (tiles * checksum_weights()).sum(1).bitwise_and((1 << 32) - 1)
        line = sums * torch.arange(1, 2 * len(sums), 2)  # int64 wraps modulo 2^64
        total += (2 * number + 1) * int(line.sum())
    return total % 2**64


@cache
def checksum_weights() -> Tensor:
    """A number of 32 bits for each place in a tile, without a pattern; int64. (No secret: nobody chooses accidents.)"""
    places = torch.arange(1, CHECKSUM_TILE + 1, dtype=torch.int64)
    for shift, factor in ((31, -0x61C8864680B583EB), (27, -0x6B2FB644ECCEEE15)):
        places = (places + 1) * factor
        places ^= places >> shift
    return places.bitwise_and((1 << 32) - 1)


# --- weighed sums -----------------------------------------------------------------------------------------------------
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


scratch = _Scratch()


def rows_of_a_group(values: Tensor, vectors: Tensor, longest: int, groups: int) -> int:
    """How many they are, when the operands of `weigh` fit each other."""
    if values.dim() != 3 or vectors.dim() != 2 or min(longest, groups) < 1:
        raise ValueError("weigh: needs (outer, row, column), (rep, row), and counts of at least 1.")
    rows = values.shape[1]
    if vectors.shape[1] != rows or rows % groups:
        raise ValueError(f"weigh: vectors of {vectors.shape[1]} for {rows} rows in {groups} groups.")
    return rows // groups


def weigh(values: Tensor, vectors: Tensor, longest: int, groups: int = 1) -> Tensor:
    """(outer, group * row, column) and float64 (rep, group * row) -> (block, outer, group, rep, column), float64.

    Sums over at most `longest` rows: block k has the k-th `longest` rows of every group. Exact for integers whose sums
    stay within 2^53.
    """
    length = rows_of_a_group(values, vectors, longest, groups)
    outer, _, columns = values.shape
    reps = len(vectors)
    out = torch.empty(max(1, -(-length // longest)), outer, groups, reps, columns, dtype=torch.float64)
    axis = 2 if outer == 1 else 0
    step = max(1, _CHUNK // max(1, values.numel() // max(1, values.shape[axis])))
    weights = vectors.reshape(reps, groups, length).transpose(0, 1)
    for part, targets in zip(
        torch.split(values, step, axis), torch.split(out, step, axis + 1 + (axis > 0)), strict=True
    ):
        doubles = scratch.doubles(part).view(part.shape[0], groups, length, part.shape[2])
        for block, target in enumerate(targets):
            some = slice(block * longest, (block + 1) * longest)
            if columns == 1:  # a product of two matrices for each group, instead of one for each row
                lines = doubles[:, :, some, 0].transpose(0, 1)
                target.squeeze(3).transpose(0, 1).copy_(torch.matmul(lines, weights[:, :, some].transpose(1, 2)))
            else:
                target.copy_(torch.matmul(weights[:, :, some], doubles[:, :, some]))
    return out
