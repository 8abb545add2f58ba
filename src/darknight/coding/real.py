"""Masking with Gaussian noise on a grid (the paper's arithmetic, without the holes of floating-point noise).

All values of a layer live on a public grid h = 2^-k: x_q = round(x / h). A noise row is R + U / L, with R a
Gaussian integer (randomness.grid_gaussian) and U uniform over the L integers around zero, and share j is the integer

    round(sum_i A1_ji x_q,i) + round(sum_m A2_jm (R_m + U_m / L))

times h: an exact int64, rounded once to the wire's dtype. L (`Mixing.divisor`) makes L times the inverse of every
coalition's noise block an integer matrix, so the integer noise that a coalition meets takes every value, equally often
up to the Gaussian envelope. Without the fraction U / L a row that carries c times the noise would show its data modulo
c, with certainty: docs/adr/0002.

Guarantees: M workers learn at most factor * C1^2 / (2 sigma^2) nats a feature from one masking, whatever the dependence
    between inputs; factor <= 1 for the systematic code (darknight.accounting has the bounds). Contract tests:
    tests/accounting/test_leakage.py, tests/coding/test_privacy_statistics.py.
Assumes: |x| <= C1, a bound declared beforehand; fresh noise; verified results. Rounding makes later weights depend
    slightly on the noise, and the bound is not proven against that.
Leaks: the bound above, at every sending; the grid and the bound C1; shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.coding.arithmetic import Real
from darknight.coding.batches import group_count
from darknight.coding.code import Code, Mixing, decoder, same_shape
from darknight.errors import EncodingError
from darknight.kernels import real as kernels
from darknight.randomness import Stream, grid_gaussian, uniform_below

TAIL = 8.6  # no Gaussian of ours is larger
_FINEST = 40
_BOUNDS = 90  # exponents of a bound that leave room for the noise in float32


@dataclass(frozen=True)
class Grid:
    """Steps of 2^-exponent; noise of `std` and `mean` steps; inputs within `bound`."""

    exponent: int
    bound: float
    std: float
    mean: float


def grid_for(mixing: Mixing, arithmetic: Real, bound: float) -> Grid:
    """The finest useful grid on which every share is an exact int64."""
    if not 2.0**-_BOUNDS <= bound <= 2.0**_BOUNDS:
        raise EncodingError(f"an input bound of {bound:g}; needs a number between 2^-{_BOUNDS} and 2^{_BOUNDS}.")
    noise = mixing.unit * (TAIL * arithmetic.noise_std + abs(arithmetic.noise_mean))
    largest = max(
        sum(abs(float(value)) for value in data) + noise * sum(map(abs, row))
        for data, row in zip(mixing.data, mixing.noise, strict=True)
    )
    magnitude = math.frexp(bound)[1]  # bound < 2^magnitude
    std, mean = mixing.unit * arithmetic.noise_std, mixing.unit * arithmetic.noise_mean
    finest = min(_FINEST, 61 - math.frexp(largest + 1)[1])  # a share below 2^61, a standard deviation below 2^58
    exponent = finest - magnitude
    steps = bound * 2.0**exponent
    return Grid(exponent, bound, std * steps, mean * steps)


def gradient_error(code: Code, arithmetic: Real) -> float:
    """The relative error to expect of a weight gradient with masked deltas, for inputs a quarter of their bound.

    Half a grid step of one factor meets the noise of the other; shares and the products of noises are rounded.
    """
    sides = [(mixing, [mixing.noise[j] for j in code.grad_rows]) for mixing in code.masking]
    norm = math.sqrt(sum((mixing.unit * value) ** 2 for mixing, rows in sides for row in rows for value in row))
    noise = arithmetic.noise_std + abs(arithmetic.noise_mean)
    step = max(2.0 ** -grid_for(mixing, arithmetic, 1.0).exponent for mixing, _ in sides)
    return 16 * noise * (step * norm / math.sqrt(12) + 10 * code.amplification * noise * 2.0**-53)


def encode(
    mixing: Mixing,
    groups: Tensor,
    grid: Grid,
    stream: Stream,
    dtype: torch.dtype,
    *,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Shares (Eq. 2): (group, input, *feature) -> (worker, group, *feature) in the wire's dtype.

    rows: only these workers' shares, in this order.
    """
    return encode_batch(mixing, groups.flatten(0, 1), grid, stream, dtype, rows=rows)[0]


def encode_batch(
    mixing: Mixing,
    batch: Tensor,
    grid: Grid,
    stream: Stream,
    dtype: torch.dtype,
    *,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The same of a batch (example, *feature), the last group filled up with zeros; and the batch on its grid.

    What is on the grid is what shares are made of, in the batch's dtype, which holds it exactly: either it has few
    bits because it is small, or its own last bit is a step or more.
    """
    values = batch.detach().contiguous()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    chosen = range(mixing.workers) if rows is None else rows
    groups = group_count(len(values), mixing.inputs)
    noise = grid_gaussian(stream, (mixing.colluders, groups, *values.shape[1:]), grid.std, grid.mean)
    fractions = uniform_below(stream, noise.shape, mixing.divisor) if mixing.divisor > 1 else None
    shares = torch.empty(len(chosen), *noise.shape[1:], dtype=dtype)
    data = [[float(value) for value in mixing.data[row]] for row in chosen]
    carriers = [mixing.noise[row] for row in chosen]
    on_grid, within = kernels.encode(
        values, grid.exponent, grid.bound, data, carriers, noise, fractions, mixing.divisor, outs=shares
    )
    if not within:
        raise _beyond(grid)
    return shares, on_grid


def to_grid(values: Tensor, grid: Grid) -> Tensor:
    """round(values / h) as float64; raises EncodingError on values beyond the bound or not finite."""
    if not bool((values.abs() <= grid.bound).all()):
        raise _beyond(grid)
    return (values.detach().to(torch.float64) * 2.0**grid.exponent).round_()


def _beyond(grid: Grid) -> EncodingError:
    return EncodingError(
        f"values that are not finite or exceed the declared bound {grid.bound:g}. Declare a larger bound."
    )


def decode(mixing: Mixing, replies: Mapping[int, Tensor]) -> Tensor:
    """y = L ybar (Eq. 3), in float64: answers (group, *feature) by worker -> (group, input, *feature)."""
    groups = len(next(iter(replies.values())))
    results = decode_batch(mixing, replies, groups * mixing.inputs, torch.float64)
    return results.view(groups, mixing.inputs, *results.shape[1:])


def decode_batch(mixing: Mixing, replies: Mapping[int, Tensor], examples: int, dtype: torch.dtype) -> Tensor:
    """The same as a batch (example, *feature), rounded once to the dtype."""
    rows, matrix = decoder(mixing, None, replies)
    answers = [replies[row] for row in rows]
    same_shape(answers)
    return kernels.decode([[float(value) for value in row] for row in matrix], answers, examples=examples, dtype=dtype)


def decode_gradient(code: Code, replies: Mapping[int, Tensor]) -> Tensor:
    """grad W = sum_j Eq_j over the base workers (Eq. 4 to 6), in float64."""
    equations = [replies[row] for row in code.grad_rows]
    same_shape(equations)
    ones = [[1.0] * len(equations)]
    return kernels.decode(ones, [each.unsqueeze(0) for each in equations], examples=1, dtype=torch.float64)[0]
