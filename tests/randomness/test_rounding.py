"""Uniforms for stochastic rounding are a public function of (seed, layer, call, kind, element), and uniform.

Contract tests of darknight.randomness.rounding: retries, recomputation and another K must not shift them.
"""

import hashlib
import itertools
import json
import struct

import pytest
import torch

from darknight.randomness import rounding_of, words_of
from randomness.judges import RejectedError, independent_pair, uniform_integers

INDEX = {"seed": 7, "layer": "features.0", "call": 3, "kind": "grad_input"}
OTHERS = {
    "seed": [0, 8, -7, 2**70],
    "layer": ["features.1", "features.00", "", "features", '0", "', "Ωmega"],
    "call": [0, 4, 30, 2**40],
    "kind": ["grad_weight", "grad_inputs", ""],
}


def rounding_words(shape, **index):
    return words_of(rounding_of(**index), shape)


def steps(words):
    """What the rounding makes of a word, in units of 2^-24."""
    return words.bitwise_and(2**24 - 1).double().reshape(-1)


def test_they_depend_on_nothing_but_their_index():
    first = rounding_words((50, 3), **INDEX)
    torch.manual_seed(1)
    rounding_words((1000,), **{**INDEX, "call": 4})
    assert torch.equal(rounding_words((50, 3), **INDEX), first)


def test_known_answer_from_the_definition():
    """Frozen: the same seed must train the same model in a later release."""
    index = json.dumps(["darknight/rounding/v2", 7, "features.0", 3, "grad_input"]).encode()
    key, other = struct.unpack("<2I", hashlib.sha256(index).digest()[:8])

    def word(number):
        h = (number * 0x9E3779B9 + key) % 2**32
        h = (h ^ h >> 16) * 0x21F0AAAD % 2**32 ^ other
        h = (h ^ h >> 15) * 0xD35A2D97 % 2**32
        return h ^ h >> 15

    assert rounding_words((4,), **INDEX).tolist() == [-1088100025, 1830829158, 610598179, -818657141]
    assert steps(rounding_words((3000,), **INDEX)).tolist() == [word(number) % 2**24 for number in range(3000)]


@pytest.mark.parametrize("layer", OTHERS["layer"])
def test_the_index_is_a_list_as_json_writes_it(layer):
    index = json.dumps(["darknight/rounding/v2", -7, layer, 2**40, "gradient"]).encode()
    made = rounding_of(seed=-7, layer=layer, call=2**40, kind="gradient")
    assert (made.key, made.other) == struct.unpack("<2I", hashlib.sha256(index).digest()[:8])


@pytest.mark.parametrize(("part", "other"), [(part, other) for part, others in OTHERS.items() for other in others])
def test_another_value_of_any_part_of_the_index_gives_independent_uniforms(part, other):
    here, there = (steps(rounding_words((20_000,), **index)) for index in (INDEX, {**INDEX, part: other}))
    independent_pair(here, there, 1 << 24)


def test_equal_uniforms_would_be_rejected_as_dependent():
    here = steps(rounding_words((20_000,), **INDEX))
    with pytest.raises(RejectedError, match="joint"):
        independent_pair(here, here, 1 << 24)


def test_parts_of_the_index_cannot_be_shifted_into_each_other():
    """("a", 1, "2b") and ("a1", 2, "b") are different places, however they are joined."""
    places = [("a", 11, "b"), ("a1", 1, "b"), ("a", 1, "1b"), ("a, 1", 1, "b"), ('a", 1, "b', 1, "b"), ("b", 1, "a")]
    found = [rounding_words((8,), seed=0, layer=layer, call=call, kind=kind) for layer, call, kind in places]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 1000])
def test_an_element_keeps_its_uniform_when_the_tensor_grows(count):
    """Another batch size or another K pads the tensor at the end and shifts nothing."""
    assert torch.equal(rounding_words((count,), **INDEX), rounding_words((4321,), **INDEX)[:count])


def test_the_shape_only_arranges_them():
    flat = rounding_words((30,), **INDEX)
    assert torch.equal(rounding_words((2, 3, 5), **INDEX), flat.view(2, 3, 5))
    assert rounding_words((0, 3), **INDEX).shape == (0, 3)


def test_their_lower_24_bits_are_uniform(full):
    """Over tensors of 300,000: within one, words of 32 bits do not repeat, so that of ten millions a few thousand fewer
    than by chance are equal in 24 bits, which is seen.
    """
    index = {key: value for key, value in INDEX.items() if key != "call"}
    words = torch.cat([rounding_words((300_000,), call=call, **index) for call in range(33 if full else 1)])
    assert words.dtype == torch.int32
    uniform_integers(steps(words), 1 << 24)


def test_within_a_tensor_no_word_comes_twice(full):
    """So its uniforms are spread a little more evenly than independent ones: none is favoured."""
    words = rounding_words((10_000_000 if full else 300_000,), **INDEX)
    assert len(words.unique()) == len(words)
    if full:
        with pytest.raises(RejectedError, match="collisions"):
            uniform_integers(steps(words), 1 << 24)


def test_neighbouring_calls_are_uniform_together():
    """Element 0 of 8,000 calls."""
    index = {key: value for key, value in INDEX.items() if key != "call"}
    firsts = torch.stack([rounding_words((1,), call=call, **index) for call in range(8000)])
    uniform_integers(steps(firsts), 1 << 24)


def test_uniforms_with_fewer_bits_are_rejected():
    """Half precision has 11 bits: rounding would be biased by 2^-12."""
    coarse = steps(rounding_words((300_000,), **INDEX)).mul(2.0**-24).half().clamp_(max=1 - 2.0**-11)
    with pytest.raises(RejectedError, match="residues"):
        uniform_integers(coarse.double() * 2**24, 1 << 24)


def test_neighbours_in_a_tensor_are_uniform_together():
    words = steps(rounding_words((200_000,), **INDEX))
    for distance in (1, 2, 14, 196, 1024, 65_536):
        independent_pair(words[:-distance][:20_000], words[distance:][:20_000], 1 << 24)
