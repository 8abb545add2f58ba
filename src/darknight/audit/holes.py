"""Which noise a generator can make at all. What it cannot make excludes candidates with certainty.

Somebody who holds a share x + r and tries a candidate x' asks whether the noise can have been share - x'. If no draw of
the generator gives that, x' is wrong, whatever the size of the noise. One pixel is enough.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from darknight.randomness import Stream, grid_gaussian

_NEIGHBOURS = 3  # floats that are tried on either side; one is enough for a correct division
_UNIFORM_BITS = 53
_GAUSSIAN_BITS = 30  # of a standard deviation; the bits below them are uniform (randomness.grid_gaussian)
_TAIL = 8.57
_NUDGES = 8  # steps of the angle that are tried on either side, against the rounding of cos and acos


def float32_noise_explains(shares: Tensor, candidates: Tensor, std: float) -> Tensor:
    """Whether some float32 z has fl(candidate + fl(std * z)) == share, all in float32; shares are spread over
    candidates.

    Kind to the scheme: every float32 counts as a possible z, though torch.randn makes far fewer.
    """
    candidates = candidates.to(torch.float32)
    shares = shares.to(torch.float32).expand_as(candidates)
    scale = torch.tensor(std, dtype=torch.float32)
    start = ((shares.to(torch.float64) - candidates.to(torch.float64)) / std).to(torch.float32)
    explained = torch.zeros(shares.shape, dtype=torch.bool)
    for direction in (-math.inf, math.inf):
        z = start.clone()
        for _ in range(_NEIGHBOURS + 1):
            explained |= candidates + scale * z == shares
            z = torch.nextafter(z, torch.full_like(z, direction))
    return explained


def grid_noise_explains(noise: Tensor, std: float, mean: float = 0.0) -> Tensor:
    """Whether our generator can make these integers, int64 of any shape: shown by making them.

    The words of the keystream that would give each one are computed, and the generator itself draws from them. So what
    is said to be possible is; what is not found counts against us.
    """
    target = noise.flatten()
    first, second, lower = _words_behind(target, std, mean)
    made = torch.zeros(target.shape, dtype=torch.bool)
    for nudge in sorted(range(-_NUDGES, _NUDGES + 1), key=abs):
        words = torch.cat([first, (second + nudge).clamp_min(0), lower, lower])
        made |= grid_gaussian(_Given(words), (2 * len(target),), std, mean)[: len(target)] == target
        if bool(made.all()):
            break
    return made.view(noise.shape)


def _words_behind(target: Tensor, std: float, mean: float) -> tuple[Tensor, Tensor, Tensor]:
    """Box and Muller's method backwards, for the cosine of each pair: words of radius, angle and lower bits."""
    bits = max(0, math.frexp(std)[1] - _GAUSSIAN_BITS)
    shifted = target - round(mean) + ((1 << bits) >> 1)
    upper = shifted >> bits
    z = upper.to(torch.float64) / (std / 2**bits)
    radius = (z.abs() + 0.25).clamp_max(_TAIL)  # a little more than |z|, so that the angle can be tuned
    first = (torch.exp(-(radius**2) / 2) * 2.0**_UNIFORM_BITS).round().clamp_min(1.0) - 1
    radius = (-2 * ((first + 1) * 2.0**-_UNIFORM_BITS).log()).sqrt()
    turns = torch.acos((z / radius).clamp(-1.0, 1.0)) / (2 * math.pi)
    return first.to(torch.int64), (turns * 2.0**_UNIFORM_BITS).round().to(torch.int64), shifted - (upper << bits)


class _Given(Stream):
    """A stream that consists of given words."""

    def __init__(self, words: Tensor) -> None:
        super().__init__(bytes(32), 0)
        self._words = words

    def words(self, count: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        taken, self._words = self._words[:count].to(dtype), self._words[count:]
        return taken.clone() if out is None else out.copy_(taken)
