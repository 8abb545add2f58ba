"""The cryptographic generator: the only source of masks.

    generator = Randomness.from_operating_system()
    stream = generator.fresh()                     # never handed out before
    noise = uniform_below(stream, (4, 10), 2**25 - 39)

Rules that this room keeps: AES-256-CTR keyed from the operating system makes every mask; a stream number is handed out
once; a stream can be replayed by its number, to check a worker's answer against its share and for nothing else. Keys of
branches alone are ever given away (docs/adr/0029-noise-rows-go-out-as-seeds.md).
"""

from darknight.kernels import Rounding
from darknight.randomness.distributions import (
    grid_gaussian,
    haar_orthogonal,
    random_signs,
    standard_normal,
    uniform_below,
)
from darknight.randomness.keystream import Branch, Randomness, Stream
from darknight.randomness.rounding import rounding_of, words_of

__all__ = [
    "Branch",
    "Randomness",
    "Rounding",
    "Stream",
    "grid_gaussian",
    "haar_orthogonal",
    "random_signs",
    "rounding_of",
    "standard_normal",
    "uniform_below",
    "words_of",
]
