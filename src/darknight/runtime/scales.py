"""Scales of the field's fixed-point numbers: powers of two, from the current values, never sent.

x's scale serves forward and the weight gradient; delta's absorbs the range of the weight gradient, which sums over
every example and position. What is expected to leave the field's range is scaled down beforehand; what leaves it all
the same is noticed by the check in the second field and repeated at a smaller scale. Where no check can notice
(`certain`), the scale is chosen so that nothing can leave the range.

A scale is a function of the values alone, so a pass that is computed again gives the same bits: docs/adr/0006.
"""

from __future__ import annotations

import math
from math import prod

from torch import Tensor

from darknight.coding import Field
from darknight.coding.fixed_point import exponent_for, largest_magnitude, moments
from darknight.errors import EncodingError
from darknight.ops import BilinearOp
from darknight.runtime.layer import SentWeights
from darknight.runtime.operand import Operand
from darknight.runtime.sizes import Sizes

TOO_LONG = (
    "the sums of this layer leave the field's range at every scale. Use a smaller batch, a larger prime, or keep the "
    "layer in the enclave (protect_'s where)."
)
_PEAK = 6.0  # peak of a sum of independent terms over its standard deviation


def _surveyed(op: BilinearOp, values: Tensor, exponent: int) -> tuple[Sizes, Sizes]:
    """Of round(values * 2^exponent), or of integers: by example, and by channel."""
    rows = op.rows(values)
    by_row, by_channel = moments(rows.reshape(*rows.shape[:2], prod(rows.shape[2:])), exponent)
    by_example = by_row.view(values.shape[0], -1, 2).sum(1)
    return Sizes.of(by_example, values[0].numel()), Sizes.of(by_channel, values.numel() // max(1, rows.shape[1]))


def weight_sizes(op: BilinearOp, shape: tuple[int, ...], moments: tuple[Tensor, Tensor]) -> tuple[Sizes, Sizes]:
    """What one element of y meets, and what one element of gx meets, from the moments of the integer weights."""
    by_row, by_channel = moments
    sizes = Sizes.of(by_row, prod(shape[1:])), Sizes.of(by_channel, prod(shape) // max(1, shape[1]))
    return sizes if op.output_axis == 0 else (sizes[1], sizes[0])


def _of_weights(weights: SentWeights) -> tuple[Sizes, Sizes]:
    assert weights.sizes is not None, "the scheme checks in the second field, so they were counted"
    return weights.sizes


def input_exponent(
    arithmetic: Field, op: BilinearOp, x: Tensor, largest: float, weights: SentWeights, certain: bool
) -> tuple[int, Sizes | None]:
    """The exponent of x, from x and the weights; and the sizes of x by channel at that scale, if they are known.

    largest: the largest magnitude, here and below.
    """
    exponent = exponent_for(largest, arithmetic.bits)
    if certain:
        reach = op.fan_in(weights.tensor.double(), tuple(x.shape))
        return _lowered(exponent, largest, reach, arithmetic.prime), None
    by_example, by_channel = _surveyed(op, x, exponent)
    over = _bits_over(by_example, _of_weights(weights)[0], arithmetic.prime)
    return exponent - over, by_channel.times(2.0**-over)


def gradient_exponent(
    arithmetic: Field,
    op: BilinearOp,
    delta: Tensor,
    largest: float,
    x: Operand,
    inputs: Sizes | None,
    weights: SentWeights,
    *,
    certain_input: bool,
    certain_weight: bool,
) -> int:
    """The exponent of delta, from delta, x and the weights; certain for each of the two gradients.

    inputs: the sizes of x by channel, if they are known.
    """
    first = exponent_for(largest, arithmetic.bits)
    w, prime = weights.tensor, arithmetic.prime
    by_example, by_channel = _surveyed(op, delta, first)
    if certain_input:
        exponent = _lowered(first, largest, op.fan_out(w.double(), x.shape), prime)
    else:
        exponent = first - _bits_over(by_example, _of_weights(weights)[1], prime)
    if certain_weight:
        # One element of the gradient meets each element of delta at most once, in one output channel.
        scaled = op.rows(delta.mul(2.0**first)).transpose(0, 1).flatten(1)
        reach, peak = float(scaled.abs().double().sum(1).amax()), largest_magnitude(x.integers)
        rows = scaled.shape[1]
        while peak * (reach * 2.0 ** (exponent - first) + rows) > prime // 2:
            exponent -= 1
            if exponent <= first - arithmetic.bits:
                raise EncodingError(TOO_LONG)
        return exponent
    met = _surveyed(op, x.integers, 0)[1] if inputs is None else inputs
    return min(exponent, first - _bits_over(met, by_channel, prime))


def _bits_over(values: Sizes, others: Sizes, prime: int) -> int:
    """By how many bits a sum over a row of `others` is expected to exceed the field's range.

    What all terms have in common, their means, adds up coherently; the rest adds up as independent terms do.
    """
    terms = others.length
    peak = terms * values.mean * others.mean + _PEAK * math.sqrt(terms) * values.rms * others.rms
    return max(0, math.ceil(math.log2(peak / (prime // 2)))) if peak else 0


def _lowered(exponent: int, largest: float, reach: float, prime: int) -> int:
    """The largest exponent, up to `exponent`, at which |values| * reach cannot leave the field's range."""
    if reach == 0 or largest == 0:
        return exponent
    room = (prime // 2) / reach - 1  # rounding adds at most one
    if room < 1:
        raise EncodingError(TOO_LONG)
    return min(exponent, math.floor(math.log2(room / largest)))
