"""Scales of the field's fixed-point numbers: powers of two, from the current values, never sent.

x's scale serves forward and the weight gradient; delta's absorbs the range of the weight gradient, which sums over
every example and position. What is expected to leave the field's range is scaled down beforehand; what leaves it all
the same is noticed by the check in the second field and repeated at a smaller scale. Where no check can notice
(`certain`), the scale is chosen so that nothing can leave the range.
"""

from __future__ import annotations

import math

from torch import Tensor

from darknight.coding import Field
from darknight.coding.fixed_point import bits_over, exponent_for, largest_magnitude, rms
from darknight.errors import EncodingError
from darknight.ops import BilinearOp
from darknight.runtime.layer import SentWeights

TOO_LONG = (
    "the sums of this layer leave the field's range at every scale. Use a smaller batch, a larger prime, or keep the "
    "layer in the enclave (protect_'s where)."
)


def input_exponent(arithmetic: Field, op: BilinearOp, x: Tensor, weights: SentWeights, certain: bool) -> int:
    """The exponent of x, from x and the weights."""
    largest = largest_magnitude(x)
    exponent = exponent_for(largest, arithmetic.bits)
    w = weights.tensor
    if certain:
        reach = op.fan_in(w.double(), tuple(x.shape))
        return _lowered(exponent, largest, reach, arithmetic.prime)
    terms = w.numel() // max(1, op.channels(tuple(w.shape))[0])
    return exponent - bits_over(_scaled_rms(x, exponent), rms(w), terms, arithmetic.prime)


def gradient_exponent(
    arithmetic: Field,
    op: BilinearOp,
    delta: Tensor,
    quantised: Tensor,
    weights: SentWeights,
    certain: tuple[bool, bool],
) -> int:
    """The exponent of delta, from delta, the quantised x and the weights; `certain` for grad input and grad weight."""
    largest = largest_magnitude(delta)
    first = exponent = exponent_for(largest, arithmetic.bits)
    w, prime = weights.tensor, arithmetic.prime
    size = _scaled_rms(delta, exponent)
    x_shape = tuple(quantised.shape)
    if certain[0]:
        exponent = _lowered(exponent, largest, op.fan_out(w.double(), x_shape), prime)
    else:
        terms = w.numel() // max(1, op.channels(tuple(w.shape))[1])
        exponent = min(exponent, first - bits_over(size, rms(w), terms, prime))
    rows = delta.shape[0] * op.positions(x_shape, tuple(delta.shape))
    if certain[1]:
        # One element of the gradient meets each element of delta at most once, in one output channel.
        by_channel = op.rows(delta).double().abs().transpose(0, 1).flatten(1).sum(1)
        reach, peak = float(by_channel.max()), largest_magnitude(quantised)
        while peak * (reach * 2.0**exponent + rows) > prime // 2:
            exponent -= 1
            if exponent <= first - arithmetic.bits:
                raise EncodingError(TOO_LONG)
    else:
        exponent = min(exponent, first - bits_over(size, rms(quantised), rows, prime))
    return exponent


def _scaled_rms(values: Tensor, exponent: int) -> float:
    """The squares of unscaled values could leave float32."""
    return rms(values.mul(2.0**exponent))


def _lowered(exponent: int, largest: float, reach: float, prime: int) -> int:
    """The largest exponent, up to `exponent`, at which |values| * reach cannot leave the field's range."""
    if reach == 0 or largest == 0:
        return exponent
    room = (prime // 2) / reach - 1  # rounding adds at most one
    if room < 1:
        raise EncodingError(TOO_LONG)
    return min(exponent, math.floor(math.log2(room / largest)))
