"""One protected layer call, all in this process: mask, let every worker compute, unmask. For tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from darknight.coding import Field, Real, Scheme, draw_code, field, joined, real, virtual_batches
from darknight.coding.fixed_point import exponent_for, largest_magnitude
from darknight.kernels import dequantise, quantise_nearest, quantise_stochastic
from darknight.ops import BilinearOp
from darknight.ops import field as field_ops
from darknight.ops import real as real_ops
from darknight.randomness import Randomness, rounding_of, words_of

_PEAK = 6.0  # peak of a sum over its standard deviation, for independent terms


@dataclass(frozen=True)
class Passes:
    y: Tensor
    gx: Tensor
    gw: Tensor


def plain(op: BilinearOp, x: Tensor, w: Tensor, delta: Tensor) -> Passes:
    """The three passes without any masking."""
    return Passes(op.forward(x, w), op.grad_input(delta, w, tuple(x.shape)), op.grad_weight(x, delta, tuple(w.shape)))


def quantised(op: BilinearOp, x: Tensor, w: Tensor, delta: Tensor, arithmetic: Field) -> tuple[tuple[Tensor, int], ...]:
    """x, w and delta as integers with their exponents, lowered where a sum is expected to leave the field's range."""
    prime, bits = arithmetic.prime, arithmetic.bits
    w_shape, x_shape = tuple(w.shape), tuple(x.shape)
    outs, ins = op.channels(w_shape)
    taps = prod(w_shape) // (outs * ins // op.groups)
    ew = exponent_for(largest_magnitude(w), bits)
    wq = quantise_nearest(w, ew)
    ex = exponent_for(largest_magnitude(x), bits)
    ex -= bits_over(rms(x) * 2.0**ex, rms(wq), taps * ins // op.groups, prime)
    xq = quantise_nearest(x, ex)
    ed = exponent_for(largest_magnitude(delta), bits)
    size = rms(delta) * 2.0**ed
    rows = x.shape[0] * op.positions(x_shape, tuple(delta.shape))
    ed -= max(bits_over(size, rms(wq), taps * outs // op.groups, prime), bits_over(size, rms(xq), rows, prime))
    words = words_of(rounding_of(seed=0, layer="layer", call=0, kind="delta"), delta.shape)
    return (xq, ex), (wq, ew), (quantise_stochastic(delta, ed, words), ed)


def protected(
    scheme: Scheme,
    op: BilinearOp,
    x: Tensor,
    w: Tensor,
    delta: Tensor,
    generator: Randomness,
    bounds: float | None = None,
) -> Passes:
    """The three passes through scheme.workers workers; every worker sees only its own shares."""
    if isinstance(scheme.arithmetic, Field):
        return _in_the_field(scheme, scheme.arithmetic, op, x, w, delta, generator)
    return _in_the_reals(scheme, scheme.arithmetic, op, x, w, delta, generator, bounds)


def _in_the_field(
    scheme: Scheme, arithmetic: Field, op: BilinearOp, x: Tensor, w: Tensor, delta: Tensor, generator: Randomness
) -> Passes:
    prime, count = arithmetic.prime, x.shape[0]
    (xq, ex), (wq, ew), (dq, ed) = quantised(op, x, w, delta, arithmetic)
    code = draw_code(scheme, generator.fresh())
    shares = field.encode(code.A, virtual_batches(xq, scheme.inputs), prime, generator.fresh())
    groups = virtual_batches(dq, scheme.inputs)
    if code.masks_gradients:
        deltas = field.encode(code.B, groups, prime, generator.fresh())
    else:
        rows = [[int(value) for value in row] for row in code.B.data]
        deltas = torch.stack([field_ops.combine_clear(row, groups, prime) for row in rows])
    share_shape = tuple(shares[0].shape)
    workers = range(scheme.workers)
    y = field.decode(code.A, {j: field_ops.forward(op, shares[j], wq, prime) for j in workers}, prime)
    gx = field.decode(code.B, {j: field_ops.grad_input(op, deltas[j], wq, share_shape, prime) for j in workers}, prime)
    gw = field.decode_gradient(
        code, {j: field_ops.grad_weight(op, shares[j], deltas[j], tuple(w.shape), prime) for j in code.grad_rows}
    )
    return Passes(
        dequantise(joined(y, count), ex + ew, x.dtype),
        dequantise(joined(gx, count), ed + ew, x.dtype),
        dequantise(gw, ex + ed, x.dtype),
    )


def _in_the_reals(
    scheme: Scheme,
    arithmetic: Real,
    op: BilinearOp,
    x: Tensor,
    w: Tensor,
    delta: Tensor,
    generator: Randomness,
    bounds: float | None,
) -> Passes:
    dtype, count = arithmetic.dtype, x.shape[0]
    code = draw_code(scheme, generator.fresh())
    weights = w.to(dtype)
    grid = real.grid_for(code.A, arithmetic, bounds or largest_magnitude(x))
    shares = real.encode(code.A, virtual_batches(x, scheme.inputs), grid, generator.fresh(), dtype)
    groups = virtual_batches(delta, scheme.inputs)
    if code.masks_gradients:
        grid = real.grid_for(code.B, arithmetic, bounds or largest_magnitude(delta))
        deltas = real.encode(code.B, groups, grid, generator.fresh(), dtype)
    else:
        rows = [tuple(float(value) for value in row) for row in code.B.data]
        deltas = torch.stack([real_ops.combine_clear(row, groups.to(dtype)) for row in rows])
    share_shape = tuple(shares[0].shape)
    workers = range(scheme.workers)
    y = real.decode(code.A, {j: real_ops.forward(op, shares[j], weights) for j in workers})
    gx = real.decode(code.B, {j: real_ops.grad_input(op, deltas[j], weights, share_shape) for j in workers})
    gw = real.decode_gradient(
        code, {j: real_ops.grad_weight(op, shares[j], deltas[j], tuple(w.shape)) for j in code.grad_rows}
    )
    return Passes(joined(y, count), joined(gx, count), gw)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """max |difference| / max |wanted|."""
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def cosine(found: Tensor, wanted: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(found.double().flatten(), wanted.double().flatten(), dim=0))


def bits_over(left_rms: float, right_rms: float, terms: int, prime: int) -> int:
    """By how many bits a sum of `terms` products of independent values is expected to exceed the field's range.

    An estimate, which the scale is lowered by beforehand so that retries stay rare. What exceeds the range all the same
    is noticed by the check in the second field.
    """
    peak = _PEAK * left_rms * right_rms * math.sqrt(terms)
    return max(0, math.ceil(math.log2(peak / (prime // 2)))) if peak else 0


def rms(values: Tensor) -> float:
    return float(values.to(torch.float32).square().mean().sqrt()) if values.numel() else 0.0
