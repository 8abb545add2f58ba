"""Freivalds' check, two-sided, in Real arithmetic: equal up to the rounding that honest workers cause.

Both sides of a bilinear identity (see ops.op) are weighed with secret random unit vectors u and v. An honest result
has rounding errors of standard deviation `spread` per element, and a sum weighed with unit vectors has the same; what
differs by more than z * spread is refused. z is such that an honest call fails with probability 1e-9.

Guarantees: let e be the difference from the true product, over the rows and channels (for a weight gradient: over the
    channels of one group) that meet in one compared number. A result with rms(e) >= 16 z spread anywhere passes with
    probability at most 2^-40, whatever the workers did and knew: |v^T e u| <= rms(e) / 16 has probability at most
    sqrt(2) E(1 + 256 g^2)^-1/2 < 1/4 with Gaussian g, and there are 20 repetitions. (Given u it is at most sqrt(2)
    (1 + 256 q)^-1/2, convex in q, and q is linear in the squared singular values of e, so rank one is worst.) Smaller
    errors are caught less surely, most of them at rms(e) = z spread. Signs instead of directions would be worse: an
    error that two rows share cancels half the time, however large.
    An rms hides what is alone: if a single element is wrong, it is certain to be noticed only from sqrt(n) times that
    on, where n elements meet. So weight gradients are weighed with u alone where that is cheap, without taps or with
    few inputs (`inputs_apart`): n is then the number of outputs, and rms(e) >= 13 z spread is certain. |e u| <=
    rms(e) / 13 has probability at most sqrt(2 / pi) / 13 < 2^-4, as no coordinate of a random direction in n dimensions
    has a density above sqrt(n / 2 pi) near zero, and there are 10 repetitions.
    Contract test, which counts and prints the figures of each scheme: tests/integrity/test_real.py.
Assumes: u and v are fresh, secret and drawn after the answers came; x, w and delta are what the workers were sent
    shares of (x on its grid, w and clear deltas in the wire's dtype); `spread` comes from the functions below and never
    from an answer, which a liar could make large. Shapes are the caller's, not a worker's.
Leaks: to the worker, that a check failed.

The spread is derived from bounds, weights, shapes and the code. A sum of s products has white parts, in which the
workers' noise enters (Gaussian, sizes add as squares), and steady parts, which may all agree (sizes add). With u the
unit roundoff of the wire:

    answer        white size * |w|_2 * u sqrt((1 + 16 roundings) / 3)    the answer is rounded, and its operand was
                  steady size * |w|_1 * u * 4 (1 + roundings)            the same for data, bounded element by element
                  grid step * |w|_1 * 4                                  shares are rounded to the grid
                  smallest float * 4 (1 + |w|_1 roundings)               below the normal range errors are absolute
                  plus 2^-53 (sqrt(s) + workers) of both sizes           sums in float64
    decoded       sqrt(sum_j L_ij^2 answer_j^2), worst i; plus what of the sources L A - [I 0] leaves behind
    gradient      the same with products of two shares and L = 1, plus what B^T A - diag(I, 0) leaves behind

The factor 4: an error that agrees between elements, weighed with u and v, has the tail of a product of two Gaussians.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from darknight.coding import Code, Mixing, decoder
from darknight.coding.algebra import whole
from darknight.coding.real import Grid
from darknight.errors import EncodingError, IntegrityError, OpError
from darknight.kernels import real as kernels
from darknight.ops import BilinearOp, collapse_rows
from darknight.ops.op import Shape
from darknight.randomness import Stream, standard_normal
from darknight.types import Pass

FALSE_ALARMS = 1e-9  # for each call
_FEW = 4  # input channels
_ROUND = 2.0**-53
_AGREEING = 4.0
_TAIL = 8.0  # no norm of N Gaussians exceeds sqrt(N) + 8
_TOGETHER = 1 << 16  # weights that are looked at: their squares stay in the cache


@dataclass(frozen=True)
class Sides:
    """How often to repeat, and the rms(e) / (z spread) from which on a wrong result passes with probability 2^-40."""

    repetitions: int
    clear: float


BOTH = Sides(20, 16.0)  # u and v
ONE = Sides(10, 13.0)  # u alone


# --- the checks -------------------------------------------------------------------------------------------------------
def verified_forward(op: BilinearOp, y: Tensor, x: Tensor, w: Tensor, stream: Stream, *, spread: float) -> Tensor:
    """y, if it is <w, x> up to errors of `spread` (decoded_spread)."""
    w_shape = tuple(w.shape)
    y_shape = op.output_shape(tuple(x.shape), w_shape)
    _expect(y, y_shape, Pass.FORWARD)
    rows = op.rows(y)
    u = _directions(stream, BOTH, op.channels(w_shape)[0])
    v = _directions(stream, BOTH, rows.shape[0])
    found = collapse_rows(_fold_channels(op, rows, u, 1), v)
    weights = op.fold_weight_output(w.to(torch.float64), u).unsqueeze(1)
    op, x = op.trimmed(x, w_shape)
    expected = op.project_forward(_fold_rows(op.rows(x), v), weights, y_shape).squeeze(1)
    _compare(Pass.FORWARD, found, expected, spread, y.numel() + x.numel())
    return y


def verified_grad_input(
    op: BilinearOp, gx: Tensor, delta: Tensor, w: Tensor, x_shape: Shape, stream: Stream, *, spread: float
) -> Tensor:
    """gx of x_shape, if it is <w, delta>^T up to errors of `spread` (decoded_spread)."""
    _expect(gx, x_shape, Pass.GRAD_INPUT)
    _expect(delta, op.output_shape(x_shape, tuple(w.shape)), Pass.GRAD_INPUT)
    rows = op.rows(gx)
    u = _directions(stream, BOTH, op.channels(tuple(w.shape))[1])
    v = _directions(stream, BOTH, rows.shape[0])
    found = collapse_rows(_fold_channels(op, rows, u, 1), v)
    weights = op.fold_weight_input(w.to(torch.float64), u).unsqueeze(1)
    expected = op.project_grad_input(_fold_rows(op.rows(delta), v), weights, x_shape).squeeze(1)
    _compare(Pass.GRAD_INPUT, found, expected, spread, gx.numel() + delta.numel())
    return gx


def verified_grad_weight(
    op: BilinearOp, gw: Tensor, x: Tensor, delta: Tensor, w_shape: Shape, stream: Stream, *, spread: float
) -> Tensor:
    """gw of w_shape, if it is <delta, x> up to errors of `spread` (gradient_spread)."""
    _expect(gw, w_shape, Pass.GRAD_WEIGHT)
    _expect(delta, op.output_shape(tuple(x.shape), w_shape), Pass.GRAD_WEIGHT)
    outs, ins = op.channels(w_shape)
    apart = inputs_apart(op, w_shape)
    u = _directions(stream, ONE if apart else BOTH, outs, op.groups)
    found = op.fold_weight_output(gw.to(torch.float64), u)
    op, x = op.trimmed(x, w_shape)
    inputs = op.rows(x)
    deltas = _fold_channels(op, op.rows(delta), u, op.groups)
    if apart:
        expected = _meet(op, inputs, deltas, w_shape)
    else:
        v = _directions(stream, BOTH, ins, op.groups)
        found = op.contract_folded(found, v)
        expected = op.project_grad_weight(_fold_channels(op, inputs, v, op.groups), deltas, w_shape)
    _compare(Pass.GRAD_WEIGHT, found, expected, spread, gw.numel() + x.numel())
    return gw


def inputs_apart(op: BilinearOp, w_shape: Shape) -> bool:
    """Whether the input channels of a weight gradient are not summed: where there are no taps, or few inputs.

    It is the finer check, with half the repetitions; with taps and many inputs it would cost too much.
    """
    return math.prod(w_shape[2:]) == 1 or op.channels(w_shape)[1] // op.groups <= _FEW


def deviations(count: int) -> float:
    """z: `count` errors with tails no heavier than a Gaussian's exceed z standard deviations once in 1e9 calls."""
    return math.sqrt(2 * math.log(2 * max(1, count) / FALSE_ALARMS))


# --- how large an honest error is -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Size:
    """What is known of a tensor: the standard deviation of its noise; of the rest, the largest element and the rms."""

    white: float
    largest: float
    rms: float

    @property
    def at_most(self) -> float:
        """What no element exceeds, but for the far tail of the noise."""
        return self.largest + _TAIL * self.white


@dataclass(frozen=True, eq=False)
class Sent:
    """What the enclave knows of the shares of one operand. `of_shares` for masked ones, `in_the_clear` for deltas."""

    mixing: Mixing
    dtype: torch.dtype
    noise: float  # standard deviation of a noise row
    mean: float  # and its mean
    largest: float  # of the data
    rms: float  # of the data: of the output channel that has most
    step: float  # of the grid
    roundings: int  # to the wire's dtype, until the operand is what the worker's op meets

    @classmethod
    def of_shares(cls, mixing: Mixing, grid: Grid, dtype: torch.dtype) -> Sent:
        """Shares that coding.real.encode made. Nothing here depends on the data beyond its declared bound."""
        step = 2.0**-grid.exponent
        return cls(mixing, dtype, grid.std * step, abs(grid.mean) * step, grid.bound, grid.bound, step, 1)

    @classmethod
    def in_the_clear(cls, op: BilinearOp, mixing: Mixing, delta: Tensor, dtype: torch.dtype) -> Sent:
        """Deltas that go out in the wire's dtype and that each worker combines with its row of B."""
        largest, square = kernels.sizes(op.rows(delta))
        return cls(mixing, dtype, 0.0, 0.0, largest, math.sqrt(square), 0.0, mixing.inputs + 1)

    @property
    def unit(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    @property
    def least(self) -> float:
        """The error of rounding a value below the normal range: there it is no part of the value any more."""
        return torch.finfo(self.dtype).smallest_normal * torch.finfo(self.dtype).eps

    def share(self, worker: int) -> _Size:
        """Of worker's share."""
        data = [abs(float(value)) for value in self.mixing.data[worker]]
        noise = self.mixing.noise[worker]
        offset = self.mean * abs(sum(noise))
        rms = math.hypot(*data) * math.sqrt(len(data)) * self.rms
        return _Size(self.noise * math.hypot(*noise), sum(data) * self.largest + offset, rms + offset)

    def source(self, place: int) -> _Size:
        """Of one input or noise row."""
        if place < self.mixing.inputs:
            return _Size(0.0, self.largest, self.rms)
        return _Size(self.noise, self.mean, self.mean)


@dataclass(frozen=True)
class Reach:
    """The weights that one element of an answer meets: norm |w|_2, sum |w|_1, and how many they are; upper bounds."""

    norm: float
    total: float
    terms: float

    @classmethod
    def of(cls, op: BilinearOp, kind: Pass, w: Tensor, x_shape: Shape) -> Reach:
        """For one of the two passes that multiply by w."""
        if kind is Pass.GRAD_WEIGHT:
            raise OpError("a weight gradient meets no weights; use gradient_spread.")
        shape, axis = tuple(w.shape), op.output_axis if kind is Pass.FORWARD else 1 - op.output_axis
        step = max(1, _TOGETHER * shape[axis] // max(1, w.numel()))
        found = []
        for some in torch.split(w.detach(), step, axis):
            weights = some.to(torch.float64)
            found.append((_fan(op, kind, weights.square(), x_shape), _fan(op, kind, weights, x_shape)))
        squares, total = torch.tensor(found, dtype=torch.float64).amax(0).tolist()  # NaN if one of them is
        # Elements that padding copies are met several times, and their errors agree.
        return cls(math.sqrt(squares * op.copies(x_shape)), total, _terms(op, kind, shape, x_shape))


def _fan(op: BilinearOp, kind: Pass, w: Tensor, x_shape: Shape) -> float:
    return op.fan_in(w, x_shape) if kind is Pass.FORWARD else op.fan_out(w, x_shape)


@lru_cache(1024)
def _terms(op: BilinearOp, kind: Pass, w_shape: Shape, x_shape: Shape) -> float:
    return _fan(op, kind, torch.ones(w_shape, dtype=torch.float64), x_shape)


def answer_spreads(reach: Reach, sent: Sent) -> dict[int, float]:
    """By worker, the standard deviation of the error of an honest answer, per element: forward or grad input."""
    sums = _ROUND * (math.sqrt(reach.terms) + sent.mixing.workers)
    relative = math.hypot(_relative(sent.unit, sent.roundings), sums)
    bounded = _AGREEING * ((sent.roundings + 1) * sent.unit + sums)
    spreads = {}
    for worker in range(sent.mixing.workers):
        size = sent.share(worker)
        steady = bounded * size.largest + _AGREEING * sent.step
        tiny = _AGREEING * sent.least * (1 + sent.roundings * reach.total)
        spreads[worker] = relative * size.white * reach.norm + steady * reach.total + tiny
    return spreads


def decoded_spread(reach: Reach, sent: Sent, available: Collection[int] | None = None) -> float:
    """The standard deviation of the error of what coding.real.decode gives when `available` workers answered."""
    workers, matrix = decoder(sent.mixing, None, available)
    answers = answer_spreads(reach, sent)
    sources = [sent.source(place) for place in range(sent.mixing.inputs + sent.mixing.colluders)]
    rounded = [[float(value) for value in row] for row in matrix]
    (L, one), (A, other) = whole(rounded), whole([sent.mixing.rows[j] for j in workers])
    worst = 0.0
    for wanted, (row, exact) in enumerate(zip(rounded, L, strict=True)):
        spread = math.hypot(*(value * answers[worker] for value, worker in zip(row, workers, strict=True)))
        for place, (size, column) in enumerate(zip(sources, zip(*A, strict=True), strict=True)):
            left = _off(exact, column, place == wanted, one * other)
            spread += left * (size.white * reach.norm + _AGREEING * size.largest * reach.total)
        worst = max(worst, spread)
    return worst


def _off(left: Sequence[int], right: Sequence[int], wanted: bool, scale: int) -> float:
    """How far <left, right> / scale is from `wanted`, rounded once."""
    found = sum(x * y for x, y in zip(left, right, strict=True))
    return abs(found - wanted * scale) / scale


def equation_spreads(
    op: BilinearOp, code: Code, x: Sent, delta: Sent, x_shape: Shape, y_shape: Shape
) -> dict[int, float]:
    """By worker of code.grad_rows, the standard deviation of the error of an honest Eq_j, per element.

    x_shape and y_shape are those of one worker's shares, (group, *feature).
    """
    products = _products(op, x_shape, y_shape)
    sums = _ROUND * (math.sqrt(products) + code.A.workers)
    relative = math.hypot(_relative(x.unit, x.roundings + delta.roundings), sums)
    bounded = _AGREEING * ((x.roundings + delta.roundings + 1) * x.unit + sums)
    root = math.sqrt(products)
    spreads = {}
    for worker in code.grad_rows:
        left, right = x.share(worker), delta.share(worker)
        steps = x.step * (root * right.white + products * right.rms) + delta.step * (
            root * left.white + products * left.rms
        )
        met = x.roundings * right.at_most + delta.roundings * left.at_most
        tiny = x.least * (1 + products * met)
        spreads[worker] = (
            relative * _white_products(products, left, right)
            + bounded * products * left.rms * right.rms
            + _AGREEING * (steps + tiny)
        )
    return spreads


def gradient_spread(op: BilinearOp, code: Code, x: Sent, delta: Sent, x_shape: Shape, y_shape: Shape) -> float:
    """The standard deviation of the error of what coding.real.decode_gradient gives; arguments as equation_spreads."""
    spread = math.hypot(*equation_spreads(op, code, x, delta, x_shape, y_shape).values())
    products = _products(op, x_shape, y_shape)
    (B, one), (A, other) = (whole([mixing.rows[j] for j in code.grad_rows]) for mixing in (code.B, code.A))
    for i, gradients in enumerate(zip(*B, strict=True)):
        for k, inputs in enumerate(zip(*A, strict=True)):
            left = _off(gradients, inputs, i == k and i < code.A.inputs, one * other)
            if left:
                sizes = x.source(k), delta.source(i)
                steady = _AGREEING * products * sizes[0].rms * sizes[1].rms
                spread += left * (_white_products(products, *sizes) + steady)
    return spread


def _relative(unit: float, roundings: int) -> float:
    """Of a white part: the answer's rounding, apart for each element, and the operands', which the op spreads."""
    return unit * math.sqrt((1 + _AGREEING**2 * roundings) / 3)


def _products(op: BilinearOp, x_shape: Shape, y_shape: Shape) -> int:
    return x_shape[0] * op.positions(x_shape, y_shape) * op.copies(x_shape)


def _white_products(count: int, left: _Size, right: _Size) -> float:
    """Of a sum of `count` products, the part in which noise enters."""
    root = math.sqrt(count)
    return (root + _TAIL) * left.white * right.white + root * (left.white * right.rms + left.rms * right.white)


# --- inside -----------------------------------------------------------------------------------------------------------
def _compare(kind: Pass, found: Tensor, expected: Tensor, spread: float, summed: int) -> None:
    """|found - expected| <= z spread. Our own sums may round too, by the size of the side that no worker can touch."""
    if not expected.numel():
        return
    own = _ROUND * math.sqrt(summed) * math.sqrt(float(expected.square().mean()))
    tolerance = deviations(expected.numel()) * (spread + own)
    if not math.isfinite(tolerance) or spread < 0:
        raise EncodingError(
            f"{kind.value}: a spread or operands that are not finite. Nothing can be compared with them."
        )
    if not bool(((found - expected).abs_() <= tolerance).all()):  # also false for what is not a number
        raise IntegrityError(
            f"{kind.value}: the result differs from the product of its operands by more than rounding explains.",
            kind=kind.value,
            check="freivalds",
        )


def _directions(stream: Stream, sides: Sides, length: int, groups: int = 1) -> Tensor:
    """(rep, length): in each group a unit vector of uniform direction."""
    gaussians = standard_normal(stream, (sides.repetitions, groups, length // groups))
    return gaussians.div_(gaussians.norm(dim=2, keepdim=True)).flatten(1)


def _fold_channels(op: BilinearOp, rows: Tensor, vectors: Tensor, groups: int) -> Tensor:
    folded = kernels.fold(rows, vectors, groups)
    return op.fold_channels(rows.to(torch.float64), vectors, groups) if folded is None else folded


def _fold_rows(rows: Tensor, v: Tensor) -> Tensor:
    lines = rows.flatten(1)
    folded = kernels.fold(lines.unsqueeze(0), v, 1)
    return (v @ lines.to(torch.float64) if folded is None else folded).view(v.shape[0], *rows.shape[1:])


def _meet(op: BilinearOp, inputs: Tensor, deltas: Tensor, w_shape: Shape) -> Tensor:
    """As op.project_grad_weight_inputs."""
    met = kernels.meet(inputs, deltas, op.groups) if op.is_pointwise(w_shape) else None
    if met is None:
        return op.project_grad_weight_inputs(inputs.to(torch.float64), deltas, w_shape)
    return met.view(*met.shape, *w_shape[2:])


def _expect(tensor: Tensor, shape: Shape, kind: Pass) -> None:
    if tuple(tensor.shape) != shape:
        raise OpError(f"{kind.value}: a tensor {tuple(tensor.shape)} where {shape} belongs.")
