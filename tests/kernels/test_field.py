"""Masking and fixed point: what is compiled gives what the reference gives, to the last bit, and touches no more."""

import itertools
import math
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from darknight import kernels
from darknight.kernels import compiled_field, masking, reference
from darknight.kernels.compiled_field import Form, Library
from darknight.kernels.reference import Rounding
from kernels.guarded import PRELUDE
from kernels.test_residues import usable

PRIMES = [2**25 - 39, 2**28 - 57]
LENGTHS = [0, 1, 2, 3, 7, 8, 9, 31, 63, 64, 65, 255, 1023, 1024, 1025, 2047, 3000]


def built(kind: str) -> Library:
    found = Library.loaded(kind)
    if found is None and shutil.which("cc") is None:
        pytest.skip("no C compiler: nothing was compiled")
    assert found is not None, "field.c was not built from these sources: install the package again"
    return found


@pytest.fixture(scope="module", params=["", "avx2_", "plain_"], ids=["best", "avx2", "plain"])
def library(request) -> Library:
    """The library's functions, as this processor runs them best, as one with AVX2 does, and as any would."""
    if not usable(request.param):
        pytest.skip("another processor")
    return built(request.param)


def residues(shape: tuple[int, ...], prime: int) -> Tensor:
    """Any, and often the largest and the smallest."""
    values = torch.randint(0, prime, shape, dtype=torch.int32)
    extreme = torch.rand(shape) < 0.1
    values[extreme] = torch.where(torch.rand(shape) < 0.5, 0, prime - 1).to(torch.int32)[extreme]
    return values


def placed(generator: random.Random, values: Tensor) -> Tensor:
    """The same values in memory as callers have them: whole, at odd places, or cut out of more along the first axis."""
    kind = generator.choice(["whole", "odd", "cut"])
    if kind == "odd":
        start = generator.randint(1, 7)
        memory = torch.empty(values.numel() + start, dtype=values.dtype)[start:].view(values.shape)
    elif kind == "cut":
        memory = torch.empty(values.shape[0], 3, *values.shape[1:], dtype=values.dtype)[:, generator.randint(0, 2)]
    else:
        memory = torch.empty_like(values)
    return memory.copy_(values)


def exactly(matrix, sources, prime: int, centred: bool) -> Tensor:
    """By the definition, in Python's integers."""
    rows = []
    for row in matrix:
        numbers = zip(*(source.flatten().tolist() for source in sources), strict=True)
        sums = [sum(c * value for c, value in zip(row, each, strict=True)) % prime for each in numbers]
        rows.append([value - prime if centred and value > prime // 2 else value for value in sums])
    return torch.tensor(rows, dtype=torch.int32).view(len(matrix), *sources[0].shape)


def drawn_matrix(generator: random.Random, rows: int, sources: int, prime: int) -> list[list[int]]:
    kinds = [[0, 1], [0, 1, -1], [1], [-5, 0, 1, 5, 7], [0, prime - 1, 1 - prime, prime // 2, -(prime // 2)]]
    entries = generator.choice(kinds)
    return [[generator.choice(entries) for _ in range(sources)] for _ in range(rows)]


@pytest.mark.parametrize("prime", PRIMES)
@pytest.mark.parametrize("seed", range(4))
def test_combinations_agree_with_the_reference_and_with_exact_integers(library, prime, seed, full):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    for trial in range(150 if full else 25):
        rows, count = generator.randint(1, 6), generator.choice([1, 2, 2, 3, 5, 6, 40])
        groups, length, centred = generator.randint(1, 3), generator.choice(LENGTHS), generator.random() < 0.5
        matrix = drawn_matrix(generator, rows, count, prime)
        whole = residues((count, groups, length), prime)
        signed = generator.random() < 0.3
        if signed:
            whole -= prime // 2
        sources = [placed(generator, source) for source in whole]
        ranges = ((-prime, prime),) if signed or generator.random() < 0.5 else ((0, prime - 1),)
        outs = [placed(generator, torch.full((groups, length), -7, dtype=torch.int32)) for _ in matrix]
        floats = [placed(generator, torch.zeros(groups, length)) for _ in matrix] if trial % 2 else []
        form = Form(tuple(map(tuple, matrix)), ranges * count, prime, centred)
        assert compiled_field.combine(library, form, sources, outs, floats, 2.0**-13)
        expected = torch.empty(rows, groups, length, dtype=torch.int32)
        reference.combine(matrix, sources, prime, out=expected, centred=centred)
        label = (trial, matrix, groups, length, ranges[0])
        assert torch.equal(torch.stack(outs), expected), label
        if length < 300:
            assert torch.equal(expected, exactly(matrix, sources, prime, centred)), label
        for made, integers in zip(floats, expected, strict=False):
            assert torch.equal(made, reference.dequantise(integers, 13, torch.float32)), label


def systematic(inputs: int) -> list[list[int]]:
    """The default code's A for one colluder."""
    data = [[int(i == j) for i in range(inputs)] + [1] for j in range(inputs)]
    return [*data, [1] * inputs + [inputs + 1], [0] * inputs + [1]]


def of_gradients(inputs: int) -> list[list[int]]:
    """Its B."""
    data = [[int(i == j) for i in range(inputs)] + [-1] for j in range(inputs)]
    return [*data, [0] * inputs + [1], [-1] * (inputs + 1)]


@pytest.mark.parametrize("prime", PRIMES)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_two_terms_are_exact_at_the_ends_of_their_ranges(library, prime, centred, sign):
    half = prime // 2
    several = [(0, prime - 1), (-1024, 1024), (-half, half), (-prime, prime), (1 - prime, 0), (half, half + 1)]
    for first, second in itertools.product(several, several):
        pairs = list(itertools.product(first, second)) * 20  # whole vectors of them, and a rest
        sources = [torch.tensor([numbers], dtype=torch.int32) for numbers in zip(*pairs, strict=True)]
        form = Form(((1, sign),), (first, second), prime, centred)
        out = torch.full((1, len(pairs)), -7, dtype=torch.int32)
        assert compiled_field.combine(library, form, sources, [out], [], 1.0)
        assert torch.equal(out, exactly(form.matrix, sources, prime, centred)[0]), (first, second)


@pytest.mark.parametrize("prime", PRIMES)
@pytest.mark.parametrize("seed", range(4))
def test_encoding_agrees_with_the_reference(library, prime, seed, full):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    for trial in range(120 if full else 25):
        inputs, noises, bits = generator.randint(1, 6), generator.choice([1, 1, 2]), generator.choice([4, 10, 11])
        examples, length = generator.randint(1, 13), generator.choice(LENGTHS[1:])
        groups = -(-examples // inputs)
        usual = generator.choice([systematic, of_gradients])(inputs)
        matrix = usual if noises == 1 else drawn_matrix(generator, 5, inputs + noises, prime)
        values = torch.randn(examples, length).clamp_(-4, 3.99)
        values[values.abs() < 0.1] = 0.0
        rounding = Rounding(*(generator.getrandbits(32) for _ in range(3))) if trial % 2 else None
        noise = residues((noises, groups, length), prime)
        wanted = [generator.random() < 0.9 for _ in matrix]
        results = []
        for run in ("compiled", "reference"):
            outs = [torch.full((groups, length), -7, dtype=torch.int32) if want else None for want in wanted]
            if run == "compiled":
                ranges = [(-(2**bits), 2**bits)] * inputs + [(0, prime - 1)] * noises
                form = Form(tuple(map(tuple, matrix)), tuple(ranges), prime, False)
                found = torch.full(values.shape, -7, dtype=torch.int32)
                given = (library, form, values, 2.0 ** (bits - 2), rounding, inputs, noise)
                assert compiled_field.encode(*given, outs, found) == 0
                alone = [None if out is None else torch.empty_like(out) for out in outs]
                row = generator.randint(0, 5)
                summed = compiled_field.encode(*given, alone, None, masking._weights(), row)  # nobody wants quantised
                for out, other in zip(outs, alone, strict=True):
                    assert out is other is None or torch.equal(out, other)
                before = torch.zeros(row, length, dtype=torch.int32)
                assert summed == (reference.checksum(torch.cat([before, found])) if rounding is None else 0)
            else:
                found = reference.encode(values, bits - 2, rounding, matrix, noise, prime, inputs=inputs, outs=outs)
            results.append([found, *(out for out in outs if out is not None)])
        for made, expected in zip(*results, strict=True):
            assert torch.equal(made, expected), (trial, inputs, noises, examples, length)
        assert int(results[0][0].abs().max()) <= 2**bits


@pytest.mark.parametrize("start", [0, 1, 3])
def test_what_goes_past_the_cache_is_the_same(library, start):
    """More numbers than stay there, in rows that begin at odd places."""
    prime, inputs, length = PRIMES[1], 3, 130_003
    torch.manual_seed(start)
    matrix, noise = systematic(inputs), residues((1, 2, length), prime)
    values, rounding = torch.randn(5, length).clamp_(-4, 3.99), Rounding(5, 6, 7)
    memory = [torch.full((start + 2 * length + 1,), -7, dtype=torch.int32) for _ in matrix]
    outs = [each[start:-1].view(2, length) for each in memory]
    form = Form(tuple(map(tuple, matrix)), ((-1024, 1024),) * inputs + ((0, prime - 1),), prime, False)
    found = torch.empty(5, length, dtype=torch.int32)
    assert compiled_field.encode(library, form, values, 256.0, rounding, inputs, noise, outs, found) == 0
    expected = [torch.empty(2, length, dtype=torch.int32) for _ in matrix]
    made = reference.encode(values, 8, rounding, matrix, noise, prime, inputs=inputs, outs=expected)
    assert torch.equal(found, made)
    for out, wanted, each in zip(outs, expected, memory, strict=True):
        assert torch.equal(out, wanted)
        assert each[:start].eq(-7).all()
        assert int(each[-1]) == -7
    back, floats = outs, [torch.empty(2, length) for _ in matrix]
    matrix = [[1, 0, 0, -1], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 4], [0, 0, -1, 0]]
    for centred in (True, False):
        form = Form(tuple(tuple(row) for row in matrix), ((0, prime - 1),) * 4, prime, centred)
        wanted = reference.combine(matrix, expected[:4], prime, out=torch.stack(expected), centred=centred)
        assert compiled_field.combine(library, form, expected[:4], back)
        assert torch.equal(torch.stack(back), wanted)
        assert compiled_field.combine(library, form, expected[:4], back, floats, 0.5)
        assert torch.equal(torch.stack(back), wanted)
        assert torch.equal(torch.stack(floats), wanted * 0.5)
    for each in memory:
        assert each[:start].eq(-7).all()
        assert int(each[-1]) == -7


@pytest.mark.parametrize("length", [180_032, 180_033])  # of whole lines, or not
@pytest.mark.parametrize("rounding", [None, Rounding(5, 6, 7)], ids=["nearest", "random"])
def test_short_tiles_go_past_the_cache_the_same(library, length, rounding):
    prime, inputs = PRIMES[1], 4
    torch.manual_seed(length)
    matrix, noise = systematic(inputs), residues((1, 2, length), prime)
    values = torch.randn(7, length).clamp_(-4, 3.99)
    form = Form(tuple(map(tuple, matrix)), ((-1024, 1024),) * inputs + ((0, prime - 1),), prime, False)
    made, found = ([torch.full((2, length), -7, dtype=torch.int32) for _ in matrix] for _ in range(2))
    expected = reference.encode(values, 8, rounding, matrix, noise, prime, inputs=inputs, outs=made)
    before = torch.zeros(3, length, dtype=torch.int32)
    for kept in (torch.full(values.shape, -7, dtype=torch.int32), None):
        given = (library, form, values, 256.0, rounding, inputs, noise, found, kept)
        summed = compiled_field.encode(*given, masking._weights(), 3)
        assert all(torch.equal(*pair) for pair in zip(found, made, strict=True))
        assert kept is None or torch.equal(kept, expected)
        assert summed == (reference.checksum(torch.cat([before, expected])) if rounding is None else 0)


@pytest.mark.parametrize("inputs", [1, 9, 64, 65, 127])  # as many as a form takes
def test_a_checksum_is_made_of_as_many_inputs_as_there_may_be(library, inputs):
    prime, length = PRIMES[1], 1500
    torch.manual_seed(inputs)
    matrix = [[1] * inputs + [1]]
    noise, values = residues((1, 2, length), prime), torch.randn(2 * inputs, length).clamp_(-4, 3.99)
    form = Form(tuple(map(tuple, matrix)), ((-1024, 1024),) * inputs + ((0, prime - 1),), prime, False)
    made, found = ([torch.full((2, length), -7, dtype=torch.int32)] for _ in range(2))
    expected = reference.encode(values, 8, None, matrix, noise, prime, inputs=inputs, outs=made)
    kept = torch.full(values.shape, -7, dtype=torch.int32)
    given = (library, form, values, 256.0, None, inputs, noise, found, kept)
    assert compiled_field.encode(*given, masking._weights(), 0) == reference.checksum(expected)
    assert torch.equal(found[0], made[0])
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("length", [180_032, 180_033, 77])  # of whole lines, or not; and what stays in the cache
@pytest.mark.parametrize("inputs", [1, 3, 4, 8, 9])
@pytest.mark.parametrize("sign", [-1, 1])
def test_results_of_a_systematic_code_are_those_of_the_reference(library, length, inputs, sign):
    prime = PRIMES[1]
    torch.manual_seed(inputs)
    matrix = [[int(i == j) for i in range(inputs)] + [sign] for j in range(inputs)]
    form = Form(tuple(map(tuple, matrix)), ((0, prime - 1),) * (inputs + 1), prime, True)
    answers = [residues((4, length), prime) for _ in range(inputs + 1)]
    memory, floats = torch.full((4, inputs, length), -7, dtype=torch.int32), torch.full((4, inputs, length), -7.0)
    outs, values = memory.transpose(0, 1), floats.transpose(0, 1)  # as a decode has them: (group, input)
    wanted = reference.combine(matrix, answers, prime, out=torch.empty_like(outs), centred=True)
    assert compiled_field.unmask(library, form, answers, list(outs), list(values), 0.5) == []
    assert torch.equal(outs, wanted)
    assert torch.equal(values, wanted * 0.5)
    for place, value in ((inputs, prime), (0, -1)):
        answers[place][3, length - 1 - place] = value
    assert compiled_field.unmask(library, form, answers, list(outs), list(values), 0.5) == [0, inputs]


@pytest.mark.parametrize("length", LENGTHS)
def test_fixed_point_agrees_with_the_reference(library, length):
    torch.manual_seed(length)
    for exponent in (-3, 0, 7, 100):
        values = torch.randn(length) * 2.0 ** (9 - exponent)
        values[::3] = (torch.arange(len(values[::3])) + 0.5) * 2.0**-exponent  # ties
        words = torch.randint(-(2**31), 2**31, (length,), dtype=torch.int32)
        nearest = compiled_field.quantise(library, values, 2.0**exponent, None)
        assert torch.equal(nearest, reference.quantise_nearest(values, exponent))
        rounded = compiled_field.quantise(library, values, 2.0**exponent, words)
        assert torch.equal(rounded, reference.quantise_stochastic(values, exponent, words))
        assert compiled_field.largest(library, values) == reference.largest_magnitude(values)


@pytest.mark.parametrize("length", LENGTHS)
def test_what_changed_is_noticed_anywhere_and_what_rounds_to_the_same_is_not(library, length):
    torch.manual_seed(length)
    values = torch.randn(length)
    known = reference.quantise_nearest(values, 7)
    assert compiled_field.unchanged(library, values, 2.0**7, known) == reference.largest_magnitude(values)
    assert reference.unchanged(values, 7, known) == reference.largest_magnitude(values)
    nearly = known * 2.0**-7  # other floats, the same integers
    assert compiled_field.unchanged(library, nearly, 2.0**7, known) == reference.unchanged(nearly, 7, known) < math.inf
    for place in {0, length // 2, length - 1} if length else ():
        for other in (float(values[place]) + 0.01, math.nan, -math.inf, 2.0**60):
            changed = values.clone()
            changed[place] = other
            assert compiled_field.unchanged(library, changed, 2.0**7, known) == math.inf
            assert reference.unchanged(changed, 7, known) == math.inf


def test_whether_they_changed_is_asked_of_operands_that_fit(library):
    values = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    known = reference.quantise_nearest(values, 3)
    assert compiled_field.unchanged(library, values, 8.0, known) == float(values.abs().max())
    assert compiled_field.unchanged(library, values, 8.0, known.contiguous()) is None
    assert compiled_field.unchanged(library, values.double(), 8.0, known) is None
    assert compiled_field.unchanged(library, values, 8.0, known[:1]) is None
    assert compiled_field.unchanged(library, values, math.inf, known) is None
    assert reference.unchanged(values, 3, known[:1]) == math.inf


def test_rounding_goes_up_as_often_as_its_words_say(library):
    values = torch.tensor([0.25, 0.25, -0.25, -0.25, 3.0, 3.0])
    words = torch.tensor([2**22 - 1, 2**22, 3 * 2**22 - 1, 3 * 2**22, 0, -1], dtype=torch.int32)
    assert compiled_field.quantise(library, values, 1.0, words).tolist() == [1, 0, 0, -1, 3, 3]


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf"), -float("nan")])
@pytest.mark.parametrize("place", [0, 8, 1029])
def test_what_is_no_number_is_noticed_anywhere(library, strange, place):
    values = torch.randn(1030)
    values[place] = strange
    assert compiled_field.largest(library, values) == math.inf
    assert not math.isfinite(reference.largest_magnitude(values))


def test_the_order_of_axes_does_not_matter(library):
    values = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    found = compiled_field.quantise(library, values, 8.0, None)
    assert found.stride() == values.stride()
    assert torch.equal(found, reference.quantise_nearest(values, 3))
    assert compiled_field.largest(library, values) == float(values.abs().max())
    assert compiled_field.largest(library, values[:, :2]) is None  # there are gaps


@pytest.mark.parametrize("bound", [2**28 - 57, 2**25 - 39, 5, 1000, 2**30 + 1])
@pytest.mark.parametrize("count", [0, 1, 1024, 5000, 40_000])
def test_words_are_cut_and_those_too_large_are_found_in_order(library, bound, count):
    torch.manual_seed(count)
    words = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32)
    words[::977] = -1
    mask, copy = (1 << (bound - 1).bit_length()) - 1, words.clone()
    places = compiled_field.below(library, words, mask, bound - 1)
    assert torch.equal(places, reference.cut_words(copy, mask, bound - 1))
    assert torch.equal(words, copy)


def test_more_words_that_are_too_large_than_is_likely_are_found_too(library):
    words = torch.full((1000,), -1, dtype=torch.int32)
    assert torch.equal(compiled_field.below(library, words, 2**28 - 1, 2**28 - 58), torch.arange(1000))


def test_batches_of_one_scale_share_a_form_and_forms_do_not_pile_up():
    """A code that is drawn for each call has another one every time."""
    built("")
    masking._known_form.cache_clear()
    values, noise, prime = torch.linspace(-3, 3, 10).view(2, 5), residues((1, 1, 5), PRIMES[1]), PRIMES[1]
    for largest in (385, 400, 512):
        given = {"inputs": 2, "largest": largest, "outs": [None] * 4, "keep": False}
        kernels.encode(values, 7, None, systematic(2), noise, prime, **given)
    assert masking._known_form.cache_info().currsize == 1
    out = torch.empty(1, 5, dtype=torch.int32)
    for factor in range(300):
        kernels.combine([[factor]], [noise[0, 0]], prime, out=out, centred=False)
        assert torch.equal(out[0], (noise[0, 0].long() * factor % prime).int())
    assert masking._known_form.cache_info().currsize < 300


def test_threads_do_not_disturb_each_other(library):
    prime, matrix = PRIMES[1], systematic(3)
    form = Form(tuple(map(tuple, matrix)), ((-1024, 1024),) * 3 + ((0, prime - 1),), prime, False)
    values, noise = torch.randn(6, 5000), residues((1, 2, 5000), prime)

    def run(_: int) -> list[Tensor]:
        outs = [torch.empty(2, 5000, dtype=torch.int32) for _ in matrix]
        compiled_field.encode(library, form, values, 64.0, None, 3, noise, outs, None)
        return outs

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(20)))
    for outs in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outs, found[0], strict=True))


# --- what it is not made for ------------------------------------------------------------------------------------------
NEVER = Library(*[lambda *_: pytest.fail("the library was called")] * len(fields(Library)))
ROW = Form(((1, 1),), ((-3, 3),) * 2, PRIMES[1], False)
X = torch.zeros(2, 5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("form", "sources", "out"),
    [
        (ROW, [X, X.long()], X),
        (ROW, [X, X[:, ::2]], X),
        (ROW, [X, X[:1]], X),
        (ROW, [X], X),
        (ROW, [X, X, X], X),
        (ROW, [X, X], X.float()),
        (ROW, [X.t().contiguous().t(), X], X),
        (Form(((1, 1),), ((-3, 3),) * 2, 7, False), [X, X], X),
        (Form(((1, 1),), ((-3, 3),) * 2, 2**27 - 2**20, False), [X, X], X),
        (Form(((1, 1),), ((-(2**29), 3),) * 2, PRIMES[1], False), [X, X], X),
        (Form(((1,) * 129,), ((-3, 3),) * 129, PRIMES[1], False), [X] * 129, X),
        (Form(((1, 1),) * 129, ((-3, 3),) * 2, PRIMES[1], False), [X, X], X),
    ],
)
def test_other_combinations_never_reach_the_library(form, sources, out):
    assert not compiled_field.combine(NEVER, form, sources, [out])


def test_other_encodings_never_reach_the_library():
    values, noise, out = (
        torch.zeros(3, 5),
        torch.zeros(1, 3, 5, dtype=torch.int32),
        torch.zeros(3, 5, dtype=torch.int32),
    )
    form = Form(((1, 1),), ((-3, 3),) * 2, PRIMES[1], False)
    for wrong in (
        (values.double(), 1.0, None, 1, noise, [out]),
        (values.t(), 1.0, None, 1, noise, [out]),
        (values, math.inf, None, 1, noise, [out]),
        (values, 1.0, None, 2, noise, [out]),
        (values, 1.0, None, 1, noise[:, :2], [out]),
        (values, 1.0, None, 1, noise, [out[:2]]),
        (values, 1.0, None, 1, noise, [out.long()]),
        (values, 1.0, None, 1, noise, [out, out]),
        (values[:0], 1.0, None, 1, noise, [out]),
    ):
        assert compiled_field.encode(NEVER, form, *wrong, torch.zeros(3, 5, dtype=torch.int32)) is None
    many = Form(((1,) * 10,), ((-3, 3),) * 10, PRIMES[1], False)  # more inputs than are kept unwritten
    assert compiled_field.encode(NEVER, many, values, 1.0, None, 9, noise[:, :1], [out[:1]], None) is None


def test_without_the_library_the_reference_does_everything(monkeypatch):
    monkeypatch.setattr(masking, "chosen", lambda: None)
    values, prime = torch.linspace(-3, 3, 10).view(2, 5), PRIMES[1]
    assert torch.equal(kernels.quantise_nearest(values, 4), reference.quantise_nearest(values, 4))
    assert kernels.largest_magnitude(values) == 3.0
    assert kernels.cut_words(torch.tensor([7, 3, 12], dtype=torch.int32), 7, 4).tolist() == [0]
    rounding = Rounding(1, 2, 3)
    assert torch.equal(kernels.rounding_words(5, rounding), reference.rounding_words(5, rounding))
    given = {"inputs": 2, "largest": 64, "outs": [None] * 4, "keep": False, "row": 0}
    masked = kernels.encode(values, 4, None, systematic(2), torch.zeros(1, 1, 5, dtype=torch.int32), prime, **given)
    assert torch.equal(masked.quantised, reference.quantise_nearest(values, 4))
    assert masked.checksum is None
    out, floats = torch.empty(1, 2, 5, dtype=torch.int32), torch.empty(1, 2, 5)
    kernels.unmask([[1]], [torch.full((2, 5), prime - 1, dtype=torch.int32)], prime, 1, out=out, floats=floats)
    assert out.unique().tolist() == [-1]
    assert floats.unique().tolist() == [-0.5]


@pytest.mark.parametrize("count", [0, 1, 15, 1024, 5003])
def test_words_of_the_rounding_agree_with_the_reference(library, count):
    for key, other in ((0, 0), (2**32 - 1, 2**32 - 1), (0x12345678, 0x9ABCDEF0)):
        for first in (0, 7, 2**32 - 3):
            rounding = Rounding(key, other, first)
            words = reference.rounding_words(count, rounding)
            assert torch.equal(compiled_field.rounding_words(library, count, rounding), words)
            if count:
                assert torch.equal(reference.rounding_words(count - 1, rounding.after(1)), words[1:])
        assert len(words.unique()) == count  # it is a bijection


# --- beyond the end ---------------------------------------------------------------------------------------------------
GUARDED = (
    PRELUDE
    + """
from darknight.kernels import compiled_field
from darknight.kernels.compiled_field import Form, Library, _NUMBER, _POINTER

beyond, prime = int(sys.argv[1]), 2**28 - 57
matrix = ((1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (1, 1, 1, 4), (0, 0, 0, 1), (5, prime // 2, 7, 9))
for kind in sys.argv[2:]:
    library = Library.loaded("" if kind == "chosen" else kind)
    for examples, n in ((1, 1), (4, 7), (5, 1024), (3, 1025), (7, 3001), (3, 200_003)):
        groups = -(-examples // 3)
        form = Form(matrix, ((-1024, 1024),) * 3 + ((0, prime - 1),), prime, False)
        size, share = 4 * examples * n, 4 * groups * n
        x, words, q, noise = (at_the_end(each) for each in (size, size, size, share))
        outs = (_POINTER * 6)(*(at_the_end(share) for _ in matrix))
        what = ctypes.byref(form.structure())
        weights = at_the_end(4 * min(n, 1024))
        keys = at_the_end(12)
        library.encode(what, x + beyond, keys, examples, 3, 64.0, q, noise, outs, groups, n, None, 0)
        library.encode(what, x, None, examples, 3, 64.0, q, noise, outs, groups, n, None, 0)
        library.encode(what, x, None, examples, 3, 64.0, None, noise, outs, groups, n, weights, 2)
        library.checksum(q, None, 1.0, examples, n, weights)
        library.checksum(None, x, 64.0, examples, n, weights)
        form = Form(matrix, ((0, prime - 1),) * 4, prime, True)
        sources = (_POINTER * 4)(*(at_the_end(share) for _ in range(4)))
        floats = (_POINTER * 6)(*(at_the_end(share) for _ in matrix))
        strides = (_NUMBER * 6)(*[n] * 6)
        what = ctypes.byref(form.structure())
        library.combine(what, sources, strides, outs, strides, floats, strides, 0.5, groups, n, None)
        library.combine(what, sources, strides, outs, strides, floats, strides, 0.5, groups, n, at_the_end(4 * 4))
        library.largest(x, examples * n)
        rows, columns = at_the_end(16 * examples), at_the_end(16 * n)
        library.moments(x, None, examples, 1, n, 2.0, rows, columns)
        library.moments(x, None, examples, n, 1, 2.0, rows, columns)
        library.moments(None, q, examples, 1, n, 2.0, rows, columns)
        library.quantise(x, words, examples * n, 2.0, q)
        library.unchanged(x, examples * n, 2.0, q)
        places = at_the_end(8 * 4)
        library.below(words, examples * n, 7, 4, places, 4)
        library.rounding(words, 0, examples * n, 5, 6)
print("done")
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guarded memory is arranged for Linux")
def test_nothing_is_read_or_written_beyond_the_end(tmp_path: Path):
    built("")
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)

    def run(beyond: int) -> subprocess.CompletedProcess[str]:
        kinds = [kind or "chosen" for kind in ("", "avx2_", "plain_") if usable(kind)]
        command = [sys.executable, str(script), str(beyond), *kinds]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run(0)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert run(4).returncode < 0  # one element further, and the process dies: the test can fail


# --- sums over what was quantised -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (3, 1, 1), (2, 5, 7), (3, 1100, 1), (2, 3, 31), (2, 3, 1024), (2, 3, 1300), (1, 2, 5003), (0, 3, 4)],
)
def test_moments_agree_with_the_reference_at_their_largest_too(library, shape):
    torch.manual_seed(0)
    values = torch.randn(shape).clamp_(-2, 2)
    for made in (values, values * 0 + 4, values * 0 - 4, (values * 1000).to(torch.int32)):
        odd = torch.empty(made.numel() + 3, dtype=made.dtype)[3:].view(shape).copy_(made)
        for placed_ in (made, odd):
            largest, found = compiled_field.moments(library, placed_, 2.0**10)
            assert largest == (reference.largest_magnitude(made) if made.is_floating_point() else 0.0)
            expected = reference.moments(made, 10)
            for mine, theirs in zip(found, expected, strict=True):
                assert mine.dtype == torch.int64
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("shape", [(3, 1100, 1), (2, 5, 7), (2, 3, 1300)])
@pytest.mark.parametrize("value", [5.0, -(2.0**60), math.inf, -math.inf, math.nan, -math.nan])
def test_at_a_scale_that_is_too_large_the_magnitude_is_found_all_the_same(library, shape, value):
    torch.manual_seed(0)
    whole = math.prod(shape)
    for place in (0, 8, whole // 2, whole - 1):
        made = torch.randn(shape).clamp_(-2, 2)
        made.view(-1)[place] = value
        found = (compiled_field.moments(library, made, 2.0**10)[0], kernels.survey(made, 10)[0])
        assert found == (abs(value) if math.isfinite(value) else math.inf,) * 2
        assert kernels.survey(made, 10)[1] is None
        assert reference.survey(made, 10)[1] is None


def test_surveys_are_what_the_reference_says(monkeypatch):
    values = torch.randn(2, 3, 5)
    for made, exponent in ((values, 8), (values.double(), 8), (torch.full((2, 3, 5), -4.0), 10)):
        largest, found = kernels.survey(made, exponent)
        assert largest == float(made.abs().max())
        assert all(torch.equal(*each) for each in zip(found, reference.moments(made, exponent), strict=True))
    monkeypatch.setattr(masking, "chosen", lambda: None)
    assert kernels.survey(values, 40) == (float(values.abs().max()), None)
    assert kernels.survey(values, 8)[1] is not None


def test_moments_are_what_they_say():
    rows, columns = kernels.moments(torch.tensor([[[1.0, 2.0], [3.0, -4.0]]]), 1)
    assert rows.tolist() == [[4, 4 * 30]]
    assert columns.tolist() == [[6, 20], [-2, 100]]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 1024), (3, 1025), (5, 2, 2049)])
def test_checksums_agree_with_the_reference(library, shape):
    torch.manual_seed(0)
    values = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    found = compiled_field.checksum(library, values, None, masking._weights())
    assert found == reference.checksum(values)
    assert 0 <= found < 2**64
    floats = torch.randn(shape)
    rounded = compiled_field.checksum(library, floats, 9, masking._weights())
    assert rounded == reference.checksum(reference.quantise_nearest(floats, 9))


def test_a_checksum_notices_values_that_change_or_change_places():
    torch.manual_seed(0)
    values = torch.randint(-1024, 1025, (3, 2500), dtype=torch.int32)
    before = kernels.checksum(values)
    for (row, place), (other_row, other) in [
        ((0, 0), (0, 1)),
        ((0, 3), (0, 3 + 1024)),
        ((1, 7), (2, 7)),
        ((0, 2499), (2, 0)),
    ]:
        changed = values.clone()
        changed[row, place], changed[other_row, other] = 5, -6
        first = kernels.checksum(changed)
        changed[row, place], changed[other_row, other] = -6, 5
        assert len({before, first, kernels.checksum(changed)}) == 3
