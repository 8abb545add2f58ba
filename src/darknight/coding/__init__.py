"""The maths of the masking: scheme, coefficients, encode, decode, gradient, in two arithmetics.

Pure functions; no I/O, clock, logging or global randomness. README.md maps words to the paper's letters.
"""

from darknight.coding.arithmetic import PRIME_25, PRIME_28, WITNESS, Field, Real
from darknight.coding.batches import group_count, joined, virtual_batches, without_padding
from darknight.coding.code import Code, Mixing, decoder
from darknight.coding.draw import draw_code
from darknight.coding.finish import Finish
from darknight.coding.scheme import Scheme
from darknight.coding.shares import MaskedShares

__all__ = [
    "PRIME_25",
    "PRIME_28",
    "WITNESS",
    "Code",
    "Field",
    "Finish",
    "MaskedShares",
    "Mixing",
    "Real",
    "Scheme",
    "decoder",
    "draw_code",
    "group_count",
    "joined",
    "virtual_batches",
    "without_padding",
]
