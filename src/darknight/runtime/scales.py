"""Scales of the field's fixed-point numbers: powers of two, from the current values, never sent.

x's scale serves forward and the weight gradient; delta's absorbs the range of the weight gradient, which sums over
every example and position. What is expected to leave the field's range is scaled down beforehand; what leaves it all
the same is noticed by the check in the second field and repeated at a smaller scale. Where no check can notice
(`certain`), the scale is chosen so that nothing can leave the range.

A scale is a function of the values alone, so a pass that is computed again gives the same bits: docs/adr/0006. What is
remembered of the call before is tried first, and decides nothing: docs/adr/0036.
"""

from __future__ import annotations

import math
from math import isfinite, prod
from typing import NamedTuple

from torch import Tensor

from darknight.coding import Field
from darknight.coding.fixed_point import exponent_for, largest_magnitude, moments
from darknight.coding.fixed_point import survey as surveyed_at
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


class Survey(NamedTuple):
    """Of a batch: the largest magnitude, the exponent at which that fills the bits, and the sizes of what the batch is
    rounded to there, by example and by channel, if they were counted.
    """

    largest: float
    exponent: int
    by_example: Sizes | None = None
    by_channel: Sizes | None = None


def survey(
    op: BilinearOp, values: Tensor, bits: int, *, counted: bool, known: float | None = None, guess: int | None = None
) -> Survey:
    """known: the largest magnitude, if somebody knows it; one that is infinite says nothing.

    guess: the exponent, probably. Then the largest magnitude and the sizes are found in one pass, and the sizes once
    more if it is another one. What is found does not depend on it.
    """
    largest, found = known if known is not None and isfinite(known) else None, None
    if largest is None:
        if counted and guess is not None:
            largest, found = surveyed_at(_by_channel(op, values), guess)
        else:
            largest = largest_magnitude(values)
    exponent = exponent_for(largest, bits)
    if not counted:
        return Survey(largest, exponent)
    if found is None or exponent != guess:
        found = moments(_by_channel(op, values), exponent)
    return Survey(largest, exponent, *_sizes(op, values, found))


def _by_channel(op: BilinearOp, values: Tensor) -> Tensor:
    """(row, channel, rest)"""
    rows = op.rows(values)
    count, channels, *rest = rows.shape
    return rows.reshape(count, channels, prod(rest))


def _sizes(op: BilinearOp, values: Tensor, moments: tuple[Tensor, Tensor]) -> tuple[Sizes, Sizes]:
    """By example, and by channel."""
    (by_row, by_channel), count, examples = moments, values.numel(), values.shape[0]
    by_example = by_row if by_row.shape[0] == examples else by_row.view(examples, -1, 2).sum(1)
    return Sizes.of(by_example, count // max(1, examples)), Sizes.of(by_channel, count // max(1, by_channel.shape[0]))


def weight_sizes(op: BilinearOp, shape: tuple[int, ...], moments: tuple[Tensor, Tensor]) -> tuple[Sizes, Sizes]:
    """What one element of y meets, and what one element of gx meets, from the moments of the integer weights."""
    by_row, by_channel = moments
    sizes = Sizes.of(by_row, prod(shape[1:])), Sizes.of(by_channel, prod(shape) // max(1, shape[1]))
    return sizes if op.output_axis == 0 else (sizes[1], sizes[0])


def _of_weights(weights: SentWeights) -> tuple[Sizes, Sizes]:
    assert weights.sizes is not None, "the scheme checks in the second field, so they were counted"
    return weights.sizes


def input_exponent(
    arithmetic: Field, op: BilinearOp, x: Tensor, found: Survey, weights: SentWeights, certain: bool
) -> tuple[int, Sizes | None]:
    """The exponent of x, from x and the weights; and the sizes of x by channel at that scale, if they are known."""
    if certain:
        reach = op.fan_in(weights.tensor.double(), tuple(x.shape))
        return _lowered(found.exponent, found.largest, reach, arithmetic.prime), None
    assert found.by_example is not None
    assert found.by_channel is not None
    over = _bits_over(found.by_example, _of_weights(weights)[0], arithmetic.prime)
    return found.exponent - over, found.by_channel.times(2.0**-over)


def gradient_exponent(
    arithmetic: Field,
    op: BilinearOp,
    delta: Tensor,
    found: Survey,
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
    first, w, prime = found.exponent, weights.tensor, arithmetic.prime
    if certain_input:
        exponent = _lowered(first, found.largest, op.fan_out(w.double(), x.shape), prime)
    else:
        assert found.by_example is not None
        exponent = first - _bits_over(found.by_example, _of_weights(weights)[1], prime)
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
    assert found.by_channel is not None
    met = _sizes(op, x.integers, moments(_by_channel(op, x.integers), 0))[1] if inputs is None else inputs
    return min(exponent, first - _bits_over(met, found.by_channel, prime))


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
