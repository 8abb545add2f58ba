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
from darknight.coding.code import Code, Mixing, decoder, same_shape
from darknight.errors import EncodingError
from darknight.kernels import combine_grid
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
    chosen = range(mixing.workers) if rows is None else rows
    shape = (len(chosen), groups.shape[0], *groups.shape[2:])
    mixed = torch.empty(shape, dtype=torch.float64)
    data = [[float(value) for value in mixing.data[row]] for row in chosen]
    carriers = [mixing.noise[row] for row in chosen]
    shares = combine_grid(data, to_grid(groups, grid).unbind(1), out=mixed).round_().to(torch.int64)
    noise = grid_gaussian(stream, (mixing.colluders, *shape[1:]), grid.std, grid.mean)
    carried = torch.empty(shape, dtype=torch.int64)
    shares += combine_grid(carriers, noise.unbind(0), out=carried)
    if mixing.divisor > 1:
        L = mixing.divisor
        fractions = uniform_below(stream, noise.shape, L).to(torch.int64).sub_(L // 2)
        combine_grid(carriers, fractions.unbind(0), out=carried)
        shares += carried.mul_(2).add_(L).div_(2 * L, rounding_mode="floor")  # round(carried / L), half up
    return shares.to(torch.float64).mul_(2.0**-grid.exponent).to(dtype)


def to_grid(values: Tensor, grid: Grid) -> Tensor:
    """round(values / h) as float64; raises EncodingError on values beyond the bound or not finite."""
    if not bool((values.abs() <= grid.bound).all()):
        raise EncodingError(
            f"values that are not finite or exceed the declared bound {grid.bound:g}. Declare a larger bound."
        )
    return (values.detach().to(torch.float64) * 2.0**grid.exponent).round_()


def decode(mixing: Mixing, replies: Mapping[int, Tensor]) -> Tensor:
    """y = L ybar (Eq. 3), in float64: answers (group, *feature) by worker -> (group, input, *feature)."""
    rows, matrix = decoder(mixing, None, replies)
    some = same_shape([replies[row] for row in rows])
    results = torch.empty(some.shape[0], mixing.inputs, *some.shape[1:], dtype=torch.float64)
    floats = [[float(value) for value in row] for row in matrix]
    combine_grid(floats, [replies[row] for row in rows], out=results.transpose(0, 1))
    return results


def decode_gradient(code: Code, replies: Mapping[int, Tensor]) -> Tensor:
    """grad W = sum_j Eq_j over the base workers (Eq. 4 to 6), in float64."""
    equations = [replies[row] for row in code.grad_rows]
    total = torch.empty(1, *same_shape(equations).shape, dtype=torch.float64)
    return combine_grid([[1.0] * len(equations)], equations, out=total)[0]
