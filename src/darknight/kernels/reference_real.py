"""Masking with noise on a grid, and linear combinations of floats in a fixed order.

Products are rounded before they are added, from the first source to the last, in float64: whoever does it in the same
order gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDING_SUM = 1.5 * 2.0**52
_ROUNDING_BITS = 0x4338 << 48  # the bits of that float64


def combine_grid(matrix: Sequence[Sequence[float]], sources: Sequence[Tensor], *, out: Tensor) -> Tensor:
    """out[row] = sum over source of matrix[row][source] * sources[source], in out's dtype.

    Exact in int64 below 2^63, and in float64 for integers below 2^53.
    """
    for row, target in zip(matrix, out, strict=True):
        target.zero_()
        for coefficient, source in zip(row, sources, strict=True):
            if coefficient:
                term = source.to(out.dtype)
                target.add_(term if coefficient == 1 else term * coefficient)
    return out


def encode(
    values: Tensor,
    exponent: int,
    bound: float,
    data: Sequence[Sequence[float]],
    carriers: Sequence[Sequence[int]],
    noise: Tensor,
    fractions: Tensor | None,
    divisor: int,
    *,
    outs: Tensor,
) -> tuple[Tensor, bool]:
    """Puts floats (example, ...) on the grid of steps 2^-exponent, and masks them in groups as large as a row of data.

    noise: int64 (noise row, group, ...) in steps. fractions: of a step, the same shape in [0, divisor), or None.
    outs: floats (row, group, ...), which are

        round(sum_i data_i x_i) + sum_m carriers_m noise_m + round(sum_m carriers_m centred_m / divisor)

    steps, with centred_m = fractions_m - divisor // 2: an int64, rounded to float64 and then to their dtype. Examples
    that are missing in the last group are zeros. Returns the values on their grid, which their own dtype holds exactly,
    and whether all are within the bound; if not, nothing that was made means anything.
    """
    wide = values.to(torch.float64)
    if not bool((wide.abs() <= bound).all()):
        return values, False
    steps = wide.mul(2.0**exponent).round_()
    inputs, groups = len(data[0]), noise.shape[1]
    padding = steps.new_zeros(groups * inputs - len(steps), *steps.shape[1:])
    whole = torch.cat([steps, padding]) if len(padding) else steps
    sources = whole.reshape(groups, inputs, *whole.shape[1:]).unbind(1)
    shape = (1, *noise.shape[1:])
    for data_row, carrier_row, out in zip(data, carriers, outs, strict=True):
        mixed = combine_grid([data_row], sources, out=torch.empty(shape, dtype=torch.float64))
        total = mixed.round_().to(torch.int64)
        carried = torch.empty(shape, dtype=torch.int64)
        total += combine_grid([carrier_row], noise.unbind(0), out=carried)
        if fractions is not None:
            centred = fractions.to(torch.int64).sub_(divisor // 2)
            combine_grid([carrier_row], centred.unbind(0), out=carried)
            total += carried.mul_(2).add_(divisor).div_(2 * divisor, rounding_mode="floor")  # half up
        out.copy_(total[0].to(torch.float64).mul_(2.0**-exponent))
    return steps.mul_(2.0**-exponent).to(values.dtype), True


def decode(
    matrix: Sequence[Sequence[float]], sources: Sequence[Tensor], *, examples: int, dtype: torch.dtype
) -> Tensor:
    """(group, ...) of each source -> (example, ...): row i of the matrix gives the i-th example of every group.

    In float64, and then rounded to the dtype. Examples beyond the last are left out.
    """
    groups, *shape = sources[0].shape
    results = torch.empty(groups, len(matrix), *shape, dtype=torch.float64)
    combine_grid(matrix, sources, out=results.transpose(0, 1))
    return results.flatten(0, 1)[:examples].to(dtype, copy=True)


def within(weights: Sequence[float], sources: Sequence[Tensor], tolerance: float) -> bool:
    """Whether |sum over source of weight * source| <= tolerance everywhere; not for what is no number."""
    total = torch.zeros(sources[0].shape, dtype=torch.float64)
    for weight, source in zip(weights, sources, strict=True):
        total.add_(source.to(torch.float64) * weight)  # also of weight zero: what is no number stays none
    return bool((total.abs_() <= tolerance).all())


def sizes(values: Tensor) -> tuple[float, float]:
    """(row, channel, ...) -> the largest magnitude, and the largest mean square of a channel.

    In float64, in any order: the last bits may differ.
    """
    if not values.numel():
        return 0.0, 0.0
    channels = values.to(torch.float64).transpose(0, 1).flatten(1)
    return float(values.abs().max()), float(channels.square().mean(1).max())


def gaussian(words: Tensor, uniforms: Tensor | None, std: float, lower: int, mean: int, *, out: Tensor) -> Tensor:
    """Gaussian integers around `mean`, int64 (count), of standard deviation 2^lower * std.

    Box-Muller from two int64 words each, of which the lower 53 bits count: all radii, and then all angles. Rounded to
    integers, these are the upper bits; the lower ones are those of `uniforms`, around zero.
    """
    count, pairs = out.numel(), len(words) // 2
    gaussians = words.bitwise_and((1 << 53) - 1).to(torch.float64)
    first, angle = gaussians[:pairs], gaussians[pairs:]
    radius = first.add_(1.0).mul_(2.0**-53).log_().mul_(-2.0).sqrt_()  # the logarithm of a value in (0, 1]
    angle.mul_(2.0 * math.pi * 2.0**-53)
    cosine = torch.cos(angle)
    angle.sin_().mul_(radius)
    radius.mul_(cosine)
    # Adding 1.5 * 2^52 rounds a float64 to an integer and leaves it in the low bits.
    out.copy_(gaussians.mul_(std).add_(_ROUNDING_SUM).view(torch.int64)[:count]).sub_(_ROUNDING_BITS)
    if uniforms is not None:
        out.mul_(1 << lower).add_(uniforms.bitwise_and((1 << lower) - 1)).sub_(1 << (lower - 1))
    return out.add_(mean)
