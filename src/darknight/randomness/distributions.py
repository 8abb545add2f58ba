"""Distributions over a keystream: uniform integers, Gaussians on a grid, signs, Haar-orthogonal matrices."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from darknight.errors import RandomnessError
from darknight.kernels import cut_words
from darknight.kernels.real import gaussian
from darknight.randomness.keystream import Stream

_GAUSSIAN_BITS = 30  # of a standard deviation: beyond it, rounding a float64 product is visibly uneven


class _Scratch(threading.local):
    """A buffer for keystream that is read once, kept: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.buffer = torch.empty(0, dtype=torch.int64)

    def words(self, count: int) -> Tensor:
        if self.buffer.numel() < count:
            with torch.inference_mode(False):  # an inference tensor could not be reused outside that mode
                self.buffer = torch.empty(count, dtype=torch.int64)
        return self.buffer[:count]


_scratch = _Scratch()


def uniform_below(stream: Stream, shape: Sequence[int], bound: int, *, out: Tensor | None = None) -> Tensor:
    """Exactly uniform integers in [0, bound), by rejection; int32 for bounds up to 2^31, else int64.

    Each word is cut to the bits of bound - 1; what is still too large is drawn again. Never a remainder: that would
    favour small values. `out` may be given to reuse memory, here and below.
    """
    if not 1 <= bound <= 1 << 62:
        raise RandomnessError(f"bound {bound}; uniform integers need 1 <= bound <= 2^62.")
    dtype = torch.int32 if bound <= 1 << 31 else torch.int64
    mask = (1 << (bound - 1).bit_length()) - 1
    values = stream.words(math.prod(shape), dtype, out=_flat(out, dtype))
    rejected = cut_words(values, mask, bound - 1)
    while rejected.numel():
        redrawn = stream.words(rejected.numel(), dtype)
        again = cut_words(redrawn, mask, bound - 1)
        values[rejected] = redrawn
        rejected = rejected[again]
    return values.view(tuple(shape))


def standard_normal(stream: Stream, shape: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """Standard Gaussians in float64 by Box-Muller from pairs of 53-bit uniforms; |z| is at most 8.58."""
    count = math.prod(shape)
    pairs = (count + 1) // 2
    words = stream.words(2 * pairs, torch.int64, out=_scratch.words(2 * pairs)).bitwise_and_((1 << 53) - 1)
    target = _flat(out, torch.float64)
    even = target is not None and target.numel() == 2 * pairs
    gaussians = target.copy_(words) if target is not None and even else words.to(torch.float64)
    first, second = gaussians[:pairs], gaussians[pairs:]
    radius = first.add_(1.0).mul_(2.0**-53).log_().mul_(-2.0).sqrt_()  # the logarithm of a value in (0, 1]
    angle = second.mul_(2.0 * math.pi * 2.0**-53)
    cosine = torch.cos(angle, out=words.view(torch.float64)[:pairs])
    angle.sin_().mul_(radius)
    radius.mul_(cosine)
    if target is not None and not even:
        return target.copy_(gaussians[:count]).view(tuple(shape))
    return gaussians[:count].view(tuple(shape))


def _flat(out: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if out is not None and out.dtype != dtype:
        raise RandomnessError(f"out of {out.dtype}; needs {dtype}.")
    return None if out is None else out.view(-1)


def grid_gaussian(
    stream: Stream, shape: Sequence[int], std: float, mean: float = 0.0, *, out: Tensor | None = None
) -> Tensor:
    """Gaussian integers of standard deviation `std` around round(mean), int64.

    std * z has too few bits below the point when std is large: rounding would prefer even integers, and a million
    shares would show it. So the Gaussian makes the upper 30 bits and exactly uniform integers the rest; what unevenness
    is left tells less than 1e-14 nats. Gaussians made in float32 are worse: they miss one grid value in eight at std
    2e4 on a grid of 2^-9, which excludes candidates with certainty.
    """
    if not 1.0 <= std <= 2.0**58 or abs(mean) > 2.0**61:
        raise RandomnessError(f"grid Gaussian of std {std:g}, mean {mean:g} grid steps; needs 1 <= std <= 2^58.")
    lower, count = max(0, math.frexp(std)[1] - _GAUSSIAN_BITS), math.prod(shape)
    target = torch.empty(tuple(shape), dtype=torch.int64) if out is None else out.view(tuple(shape))
    pairs = (count + 1) // 2
    drawn = _scratch.words(2 * pairs + (count if lower else 0))
    words = stream.words(2 * pairs, torch.int64, out=drawn[: 2 * pairs])
    uniforms = stream.words(count, torch.int64, out=drawn[2 * pairs :]) if lower else None
    gaussian(words, uniforms, std / 2**lower, lower, round(mean), out=target.view(-1))
    return target


def random_signs(stream: Stream, count: int) -> Tensor:
    """Independent fair signs, as float64."""
    return uniform_below(stream, (count,), 2).to(torch.float64).mul_(2.0).sub_(1.0)


def haar_orthogonal(stream: Stream, fixed: Tensor, columns: int) -> Tensor:
    """`columns` orthonormal columns, Haar-distributed on the orthogonal complement of the columns of `fixed`.

    With no fixed columns and columns == rows this is a Haar-orthogonal matrix. QR of a Gaussian matrix, with the signs
    of R's diagonal moved into Q; without that the result is not Haar.
    """
    rows, kept = fixed.shape
    gaussians = standard_normal(stream, (rows, columns))
    basis, upper = torch.linalg.qr(torch.cat([fixed, gaussians], dim=1))
    haar: Tensor = basis * torch.sign(torch.diagonal(upper))
    return haar[:, kept:]
