"""Shares are made where a worker may look at any moment: whoever looks sees what was there before, or the share."""

import threading

import pytest
import torch

from darknight.coding import Scheme, draw_code
from darknight.kernels import compiled_field, masking, reference
from darknight.kernels.compiled_field import Form
from darknight.kernels.reference import Rounding
from darknight.randomness import Randomness
from kernels.test_field import PRIMES, built

PRIME = PRIMES[1]
BEFORE = -7  # no residue
INPUTS, FEATURES = 4, 70_001


def rows_of(scheme):
    return [[int(number) for number in row] for row in draw_code(scheme, Randomness(bytes(32)).fresh()).A.rows]


MATRIX = rows_of(Scheme(inputs=4, colluders=1))
DENSE = rows_of(Scheme(inputs=4, colluders=2, mixing="dense"))


def by_masking(values, rounding, noise, outs, matrix):
    masking.encode(values, 6, rounding, matrix, noise, PRIME, inputs=INPUTS, largest=1 << 12, outs=outs, keep=False)


def compiled(kind):
    def run(values, rounding, noise, outs, matrix):
        ranges = ((-(1 << 12), 1 << 12),) * INPUTS + ((0, PRIME - 1),) * len(noise)
        form = Form(tuple(map(tuple, matrix)), ranges, PRIME, False)
        assert compiled_field.encode(built(kind), form, values, 64.0, rounding, INPUTS, noise, outs, None) is not None

    return run


def without_a_compiler(values, rounding, noise, outs, matrix):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "chosen", lambda: None)
        by_masking(values, rounding, noise, outs, matrix)


def in_two_steps(values, rounding, noise, outs, matrix):
    """What is to be hidden first, and then what hides it."""
    quantised = reference.quantise_nearest(values, 6).view(-1, INPUTS, FEATURES)
    for place in range(INPUTS):
        outs[place].copy_(quantised[:, place]).add_(noise[0]).remainder_(PRIME)
    reference.encode(values, 6, rounding, matrix[INPUTS:], noise, PRIME, inputs=INPUTS, outs=outs[INPUTS:])


HONEST = {
    "masking": by_masking,
    "compiled": compiled(""),
    "plain": compiled("plain_"),
    "avx2": compiled("avx2_"),
    "without a compiler": without_a_compiler,
}


def glimpses(encode, tries, matrix=MATRIX):
    """How often somebody who looks all the time saw something that is neither what was there, nor the share."""
    torch.manual_seed(0)
    values = torch.randn(2 * INPUTS, FEATURES)
    rounding = None if matrix is MATRIX else Rounding(3, 4)
    noise = torch.randint(0, PRIME, (len(matrix[0]) - INPUTS, 2, FEATURES), dtype=torch.int32)
    outs = [torch.full((2, FEATURES), BEFORE, dtype=torch.int32) for _ in matrix]
    shares = [torch.empty_like(out) for out in outs]
    reference.encode(values, 6, rounding, matrix, noise, PRIME, inputs=INPUTS, outs=shares)
    over, wrong = threading.Event(), []

    def look():
        while not over.is_set():
            for out, share in zip(outs, shares, strict=True):
                seen = out.clone()
                wrong.append(not bool(((seen == BEFORE) | (seen == share)).all()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(tries):
            for out in outs:
                out.fill_(BEFORE)
            encode(values, rounding, noise, outs, matrix)
            assert all(map(torch.equal, outs, shares))
    finally:
        over.set()
        thread.join()
    assert wrong
    return sum(wrong)


@pytest.mark.parametrize("encode", HONEST.values(), ids=HONEST)
def test_nothing_but_the_share_is_ever_seen(encode):
    assert glimpses(encode, 60) == 0


@pytest.mark.parametrize("kind", ["", "plain_"])
def test_nor_with_a_dense_code_and_random_rounding(kind):
    assert glimpses(compiled(kind), 20, DENSE) == 0


def test_who_masks_in_two_steps_is_found_by_that():
    assert sum(glimpses(in_two_steps, 60) for _ in range(3)) > 0
