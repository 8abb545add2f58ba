"""Which noise values a generator can reach at all. A value that it cannot reach tells an attacker something for sure.

The attacker holds a share x + r and a candidate x'. If no draw of the generator gives the noise share - x', then x' is
wrong, with certainty and whatever the noise's size.
"""

import math

import torch
from torch import Tensor

from darknight.randomness import grid_gaussian
from darknight.randomness.distributions import _GAUSSIAN_BITS as GAUSSIAN_BITS
from randomness.streams import Scripted

_ULPS = 3  # neighbours that are tried on either side of the quotient; one is enough for a correct division


def float32_reaches(noise: Tensor, std: float, offset: Tensor | None = None) -> Tensor:
    """Whether some float32 z has fl(offset + fl(std * z)) == noise, in float32 throughout; offset 0 unless given.

    Generous to float32: every float32 is taken for a possible z, though torch.randn makes far fewer.
    """
    noise = noise.to(torch.float32)
    offset = torch.zeros_like(noise) if offset is None else offset.to(torch.float32)
    scale = torch.tensor(std, dtype=torch.float32)
    start = ((noise.double() - offset.double()) / std).to(torch.float32)
    reached = torch.zeros(noise.shape, dtype=torch.bool)
    for direction in (-math.inf, math.inf):
        z = start.clone()
        for _ in range(_ULPS + 1):
            reached |= offset + scale * z == noise
            z = torch.nextafter(z, torch.full_like(z, direction))
    return reached


def could_be_drawn(target: Tensor, std: float, mean: float = 0.0) -> Tensor:
    """Whether grid_gaussian can make these integers (int64): the words that would are computed, and drawn from."""
    count = len(target)
    first, second, lower = _words_that_give(target, std, mean)
    reached = torch.zeros(count, dtype=torch.bool)
    for nudge in range(-8, 9):  # of the angle, against the rounding of cos and acos
        words = torch.cat([first, (second + nudge).clamp(min=0), lower, lower])
        reached |= grid_gaussian(Scripted(words), (2 * count,), std, mean)[:count] == target
    return reached


def _words_that_give(target: Tensor, std: float, mean: float) -> tuple[Tensor, Tensor, Tensor]:
    """Box-Muller backwards, for the cosine of each pair: words for the radius, for the angle, and for the lower bits.

    z = radius cos(angle), with a radius a little beyond |z|, so that the angle can be tuned.
    """
    bits = max(0, math.frexp(std)[1] - GAUSSIAN_BITS)
    shifted = target - round(mean) + ((1 << bits) >> 1)
    upper = shifted >> bits
    z = upper.to(torch.float64) / (std / 2**bits)
    radius = (z.abs() + 0.25).clamp(max=8.57)
    first = (torch.exp(-(radius**2) / 2) * 2.0**53).round().clamp(min=1.0) - 1
    radius = (-2 * ((first + 1) * 2.0**-53).log()).sqrt()
    second = (torch.acos(z / radius) / (2 * math.pi) * 2.0**53).round()
    return first.to(torch.int64), second.to(torch.int64), shifted - (upper << bits)
