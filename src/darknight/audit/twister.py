"""Torch's generator on the CPU, the Mersenne Twister MT19937, taken apart: from outputs seen to the next ones.

Its state is its last 624 words, and every output is a word of the state with its bits mixed by a map that anybody can
invert. `torch.randint(p)` gives a word modulo p, which for p near 2^28 leaves sixteen words that it may have been. But
word i + 624 follows from words i, i + 1 and i + 397, and only the true ones fit together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from darknight.errors import DataError

Words = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]

_WORDS = 1 << 32
_STATE, _MIDDLE = 624, 397
NEEDED = 2 * _STATE  # consecutive outputs from which the state follows
_TWIST = np.uint32(0x9908B0DF)
_UPPER, _LOWER = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_MIXING_B, _MIXING_C = np.uint32(0x9D2C5680), np.uint32(0xEFC60000)


class Twister:
    """The generator from a state of 624 words on."""

    def __init__(self, state: Words) -> None:
        self._state = state.astype(np.uint32)

    def below(self, prime: int, count: int) -> npt.NDArray[np.int64]:
        """The next outputs modulo `prime`, as torch.randint(prime, ...) makes them."""
        words = list[Words]()
        while sum(map(len, words)) < count:
            words.append(self._turn())
        return tempered(np.concatenate(words)[:count]).astype(np.int64) % prime

    def _turn(self) -> Words:
        """The next words of the state, as many as do not depend on each other."""
        count = _STATE - _MIDDLE
        new = _next(self._state[:count], self._state[1 : count + 1], self._state[_MIDDLE:])
        self._state = np.concatenate([self._state[count:], new])
        return new


def recovered(seen: npt.NDArray[np.int64], prime: int) -> tuple[Twister | None, int]:
    """The generator behind consecutive outputs modulo `prime`, and how many of their relations can hold.

    None if no state gives these outputs. The generator returned goes on where they end.
    """
    if len(seen) < NEEDED:
        raise DataError(f"{len(seen)} outputs; the state of the generator needs {NEEDED}.")
    candidates = seen[:, None] + prime * np.arange(-(-_WORDS // prime))  # (output, which): words that it may have been
    words = untempered(candidates.astype(np.uint32))
    possible, holding = _consistent(words, candidates < _WORDS, _relations(words, seen, prime))
    state = possible[-_STATE:]
    if holding < len(seen) - _STATE or not (state.sum(axis=1) == 1).all():
        return None, holding
    return Twister(words[-_STATE:][state]), holding


def _relations(words: Words, seen: npt.NDArray[np.int64], prime: int) -> npt.NDArray[np.int64]:
    """All ways in which the recurrence can hold: rows of an output, the highest bit of its word, and which candidates
    its successor, the middle word and the word that follows from them are."""
    found = []
    highest = np.array([0, _UPPER], dtype=np.uint32)[:, None, None]  # all that matters of the first word
    for place in range(len(words) - _STATE):
        following = tempered(_next(highest, words[place + 1][:, None], words[place + _MIDDLE])).astype(np.int64)
        bit, second, middle = (following % prime == seen[place + _STATE]).nonzero()
        last = following[bit, second, middle] // prime
        found.append(np.stack([np.full_like(bit, place), bit, second, middle, last]))
    return np.concatenate(found, axis=1)


def _consistent(words: Words, possible: Flags, relations: npt.NDArray[np.int64]) -> tuple[Flags, int]:
    """The candidates that every relation of their output allows, and how many relations can still hold."""
    highest = _down(words, 31).astype(np.int64)
    outputs = len(words)
    ends = outputs - _STATE
    while True:
        bits = np.stack([(possible & (highest == bit)).any(axis=1) for bit in (0, 1)], axis=1)
        place, bit, second, middle, last = relations
        holds = bits[place, bit] & possible[place + 1, second] & possible[place + _MIDDLE, middle]
        holds &= possible[place + _STATE, last]
        relations = place, bit, second, middle, last = relations[:, holds]
        allowed = np.take_along_axis(_marked((outputs, 2), place, bit, 0, ends), highest, axis=1)
        allowed &= _marked(possible.shape, place + 1, second, 1, ends)
        allowed &= _marked(possible.shape, place + _MIDDLE, middle, _MIDDLE, ends)
        allowed &= _marked(possible.shape, place + _STATE, last, _STATE, ends)
        if np.array_equal(possible & allowed, possible):
            return possible, len(np.unique(place))
        possible = possible & allowed


def _marked(
    shape: tuple[int, ...], place: npt.NDArray[np.int64], which: npt.NDArray[np.int64], start: int, count: int
) -> Flags:
    """What relations allow at the `count` outputs from `start` on; they say nothing about the others."""
    allowed = np.ones(shape, dtype=np.bool_)
    allowed[start : start + count] = False
    allowed[place, which] = True
    return allowed


def tempered(words: Words) -> Words:
    """A word of the state as it is put out."""
    words = words ^ _down(words, 11)
    words = words ^ (_up(words, 7) & _MIXING_B)
    words = words ^ (_up(words, 15) & _MIXING_C)
    return words ^ _down(words, 18)


def untempered(words: Words) -> Words:
    """The inverse: each step is undone from the bits that it left alone."""
    words = words ^ _down(words, 18)
    words = words ^ (_up(words, 15) & _MIXING_C)
    mixed = words
    for _ in range(4):
        words = mixed ^ (_up(words, 7) & _MIXING_B)
    mixed = words
    for _ in range(2):
        words = mixed ^ _down(words, 11)
    return words


def _next(first: Words, second: Words, middle: Words) -> Words:
    """Word i + 624 from words i, i + 1 and i + 397."""
    joined = (first & _UPPER) | (second & _LOWER)
    return middle ^ _down(joined, 1) ^ (_TWIST * (joined & np.uint32(1)))


def _down(words: Words, bits: int) -> Words:
    return words >> np.uint32(bits)


def _up(words: Words, bits: int) -> Words:
    return words << np.uint32(bits)
