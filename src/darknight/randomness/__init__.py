"""The cryptographic generator: the only source of masks.

    generator = Randomness.from_operating_system()
    stream = generator.fresh()                     # never handed out before
    noise = uniform_below(stream, (4, 10), 2**25 - 39)

Rules that this room keeps: AES-256-CTR keyed from the operating system makes every mask; a stream number is handed out
once; a stream can be replayed by its number, to check a worker's answer against its share and for nothing else.
"""

from darknight.randomness.distributions import (
    grid_gaussian,
    haar_orthogonal,
    random_signs,
    standard_normal,
    uniform_below,
)
from darknight.randomness.keystream import Randomness, Stream
from darknight.randomness.rounding import rounding_words

__all__ = [
    "Randomness",
    "Stream",
    "grid_gaussian",
    "haar_orthogonal",
    "random_signs",
    "rounding_words",
    "standard_normal",
    "uniform_below",
]
