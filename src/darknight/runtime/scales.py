"""Scales of the field's fixed-point numbers: powers of two, from the current values, never sent.

x's scale serves forward and the weight gradient; delta's absorbs the range of the weight gradient, which sums over
every example and position. What is expected to leave the field's range is scaled down beforehand; what leaves it all
the same is noticed by the check in the second field and repeated at a smaller scale. Where no check can notice
(`certain`), the scale is chosen so that nothing can leave the range.

A scale is a function of the values alone, so a pass that is computed again gives the same bits: docs/adr/0006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.coding import Field
from darknight.coding.fixed_point import exponent_for, largest_magnitude
from darknight.errors import EncodingError
from darknight.ops import BilinearOp
from darknight.runtime.layer import SentWeights

TOO_LONG = (
    "the sums of this layer leave the field's range at every scale. Use a smaller batch, a larger prime, or keep the "
    "layer in the enclave (protect_'s where)."
)
_PEAK = 6.0  # peak of a sum of independent terms over its standard deviation


@dataclass(frozen=True)
class _Sizes:
    """Of rows of numbers: the largest |mean|, the largest root mean square, the length of a row."""

    mean: float
    rms: float
    length: int

    @classmethod
    def of(cls, rows: Tensor) -> _Sizes:
        if not rows.numel():
            return cls(0.0, 0.0, 0)
        means, squares = rows.mean(1).abs().amax(), rows.square().mean(1).amax()
        return cls(float(means), math.sqrt(float(squares)), rows.shape[1])


def input_exponent(arithmetic: Field, op: BilinearOp, x: Tensor, weights: SentWeights, certain: bool) -> int:
    """The exponent of x, from x and the weights."""
    largest = largest_magnitude(x)
    exponent = exponent_for(largest, arithmetic.bits)
    w = weights.tensor
    if certain:
        return _lowered(exponent, largest, op.fan_in(w.double(), tuple(x.shape)), arithmetic.prime)
    examples = _Sizes.of(_scaled(x, exponent).flatten(1))
    return exponent - _bits_over(examples, _Sizes.of(op.by_output(w).to(torch.float32)), arithmetic.prime)


def gradient_exponent(
    arithmetic: Field,
    op: BilinearOp,
    delta: Tensor,
    quantised: Tensor,
    weights: SentWeights,
    *,
    certain_input: bool,
    certain_weight: bool,
) -> int:
    """The exponent of delta, from delta, the quantised x and the weights; certain for each of the two gradients."""
    largest = largest_magnitude(delta)
    first = exponent_for(largest, arithmetic.bits)
    w, prime = weights.tensor, arithmetic.prime
    scaled = _scaled(delta, first)
    if certain_input:
        exponent = _lowered(first, largest, op.fan_out(w.double(), tuple(quantised.shape)), prime)
    else:
        exponent = first - _bits_over(_Sizes.of(scaled.flatten(1)), _Sizes.of(op.by_input(w).to(torch.float32)), prime)
    by_channel = _by_channel(op, scaled)
    if certain_weight:
        # One element of the gradient meets each element of delta at most once, in one output channel.
        reach, peak = float(by_channel.abs().double().sum(1).amax()), largest_magnitude(quantised)
        rows = by_channel.shape[1]
        while peak * (reach * 2.0 ** (exponent - first) + rows) > prime // 2:
            exponent -= 1
            if exponent <= first - arithmetic.bits:
                raise EncodingError(TOO_LONG)
        return exponent
    inputs = _Sizes.of(_by_channel(op, quantised.to(torch.float32)))
    return min(exponent, first - _bits_over(inputs, _Sizes.of(by_channel), prime))


def _bits_over(values: _Sizes, others: _Sizes, prime: int) -> int:
    """By how many bits a sum over a row of `others` is expected to exceed the field's range.

    What all terms have in common, their means, adds up coherently; the rest adds up as independent terms do.
    """
    terms = others.length
    peak = terms * values.mean * others.mean + _PEAK * math.sqrt(terms) * values.rms * others.rms
    return max(0, math.ceil(math.log2(peak / (prime // 2)))) if peak else 0


def _scaled(values: Tensor, exponent: int) -> Tensor:
    """Near 2^bits, so that squares stay within float32."""
    return values.mul(2.0**exponent).to(torch.float32)


def _by_channel(op: BilinearOp, values: Tensor) -> Tensor:
    """(channel, everything else)."""
    return op.rows(values).transpose(0, 1).flatten(1)


def _lowered(exponent: int, largest: float, reach: float, prime: int) -> int:
    """The largest exponent, up to `exponent`, at which |values| * reach cannot leave the field's range."""
    if reach == 0 or largest == 0:
        return exponent
    room = (prime // 2) / reach - 1  # rounding adds at most one
    if room < 1:
        raise EncodingError(TOO_LONG)
    return min(exponent, math.floor(math.log2(room / largest)))
