"""Masking with Gaussian noise on a grid (the paper's arithmetic, without the holes of floating-point noise).

Noise lives on a public grid h = 2^-k, data on the grid L h: x_q = round(x / (L h)). With R = round(S z) Gaussian
integers, share j is the integer

    L round(sum_i A1_ji x_q,i) + sum_m A2_jm R_m

times h: an exact sum, rounded once to the wire's dtype. L (`Mixing.divisor`) makes L times the inverse of every
coalition's noise block an integer matrix. So data moves a coalition's shares by a vector of the lattice on which its
noise lives, and only the Gaussian envelope tells one input from another. With L = 1 a row that carries c times the
noise would show its data modulo c, with certainty: docs/adr/0002.

Guarantees: M workers learn at most factor * C1^2 / (2 sigma^2) nats a feature from one masking, whatever the dependence
    between inputs; factor <= 1 for the systematic code (darknight.accounting has the bounds).
Assumes: |x| <= C1, a bound declared beforehand; fresh noise; verified results. Rounding makes later weights depend
    slightly on the noise, and the bound is not proven against that.
Leaks: the bound above, at every sending; the grid and the bound C1; shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.coding.code import Code, Mixing, decoder
from darknight.coding.scheme import Real
from darknight.errors import EncodingError
from darknight.kernels import combine_grid
from darknight.randomness import Stream, grid_gaussian

_TAIL = 8.6  # no Gaussian of ours is larger
_FINEST = 40


@dataclass(frozen=True)
class Grid:
    """Noise in steps of 2^-exponent, data in `divisor` steps; `std` and `mean` in steps; inputs within `bound`."""

    exponent: int
    divisor: int
    bound: float
    std: float
    mean: float


def grid_for(mixing: Mixing, arithmetic: Real, bound: float) -> Grid:
    """The finest grid on which every share stays an exact integer below 2^53."""
    if not (math.isfinite(bound) and bound > 0):
        raise EncodingError(f"an input bound of {bound}; needs a positive number.")
    noise = mixing.unit * (_TAIL * arithmetic.noise_std + abs(arithmetic.noise_mean))
    largest = max(
        sum(abs(float(value)) for value in data) + noise * sum(map(abs, row))
        for data, row in zip(mixing.data, mixing.noise, strict=True)
    )
    magnitude = math.frexp(bound)[1]  # bound < 2^magnitude
    finest = min(_FINEST, 53 - math.frexp(largest + 1)[1], 48 - math.frexp(mixing.unit * arithmetic.noise_std)[1])
    exponent = finest - magnitude
    steps = bound * 2.0**exponent
    std, mean = (mixing.unit * value * steps for value in (arithmetic.noise_std, arithmetic.noise_mean))
    return Grid(exponent, mixing.divisor, bound, std, mean)


def encode(mixing: Mixing, groups: Tensor, grid: Grid, stream: Stream, dtype: torch.dtype) -> Tensor:
    """Shares (Eq. 2): (group, input, *feature) -> (worker, group, *feature) in the wire's dtype."""
    shares = torch.empty(mixing.workers, groups.shape[0], *groups.shape[2:], dtype=torch.float64)
    data = [[float(value) for value in row] for row in mixing.data]
    combine_grid(data, to_grid(groups, grid).unbind(1), out=shares)
    shares.round_().mul_(grid.divisor)
    noise = grid_gaussian(stream, (mixing.colluders, *shares.shape[1:]), grid.std, grid.mean)
    shares += combine_grid(mixing.noise, noise.unbind(0), out=torch.empty_like(shares))
    return shares.mul_(2.0**-grid.exponent).to(dtype)


def to_grid(values: Tensor, grid: Grid) -> Tensor:
    """round(values / (L h)) as float64; raises EncodingError on values beyond the bound or not finite."""
    if not bool((values.abs() <= grid.bound).all()):
        raise EncodingError(
            f"values that are not finite or exceed the declared bound {grid.bound:g}. Declare a larger bound."
        )
    return (values.to(torch.float64) * (2.0**grid.exponent / grid.divisor)).round_()


def decode(mixing: Mixing, replies: Mapping[int, Tensor]) -> Tensor:
    """y = L ybar (Eq. 3), in float64: answers (group, *feature) by worker -> (group, input, *feature)."""
    rows, matrix = decoder(mixing, None, replies)
    some = replies[rows[0]]
    results = torch.empty(some.shape[0], mixing.inputs, *some.shape[1:], dtype=torch.float64)
    floats = [[float(value) for value in row] for row in matrix]
    combine_grid(floats, [replies[row] for row in rows], out=results.transpose(0, 1))
    return results


def decode_gradient(code: Code, replies: Mapping[int, Tensor]) -> Tensor:
    """grad W = sum_j Eq_j over the base workers (Eq. 4 to 6), in float64."""
    equations = [replies[row] for row in code.grad_rows]
    total = torch.empty(1, *equations[0].shape, dtype=torch.float64)
    return combine_grid([[1.0] * len(equations)], equations, out=total)[0]


def combine_clear(row: tuple[float, ...], deltas: Tensor) -> Tensor:
    """sum_i beta_ji delta_i: the worker's part of Eq. 4 when gradients are in the clear; delta (group, input, ...)."""
    return torch.einsum("i,gi...->g...", torch.tensor(row, dtype=deltas.dtype), deltas)
