"""Unmasking and weighing in one pass: the same as one after the other, to the last bit, and nothing else is touched."""

import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from darknight import kernels
from darknight.kernels import compiled_unmasking, reference, reference_residues
from darknight.kernels.compiled import Function
from darknight.kernels.compiled_field import Form
from darknight.kernels.compiled_layers import Affine
from darknight.kernels.compiled_unmasking import Weighing
from kernels.guarded import PRELUDE
from kernels.layout import fields_in, fields_of
from kernels.test_field import drawn_matrix, placed, residues
from kernels.test_residues import MODULI, at_once, entries, usable

KINDS = ["", "avx2_", "plain_"]
POSITIONS = [1, 2, 9, 16, 49, 195, 255, 256, 257, 512, 513, 784, 1024, 2048, 2065, 3001]


@pytest.fixture(params=KINDS, ids=["chosen", "avx2", "plain"])
def function(request) -> Function:
    found = compiled_unmasking.chosen(request.param) if usable(request.param) else None
    if found is None:
        pytest.skip("nothing was compiled, or another processor")
    return found


def expected(form: Form, sources: list[Tensor], examples: int, exponent: int, how: Weighing) -> tuple[Tensor, Tensor]:
    """One after the other, by the references."""
    integers = torch.empty(len(form.matrix), *sources[0].shape, dtype=torch.int32)
    reference.combine(form.matrix, sources, form.prime, out=integers, centred=True)
    whole = integers.transpose(0, 1).flatten(0, 1)[:examples]
    rows = whole.reshape(how.rows.shape[1], how.channels.shape[1], how.positions)
    sums = reference_residues.weigh_rows(rows, how.channels, how.rows, how.primes, longest=how.longest, often=how.often)
    return reference.dequantise(whole, exponent, torch.float32), sums


def try_one(function: Function, generator: random.Random, positions: int) -> None:
    prime = generator.choice([2**28 - 57, 2**25 - 39])
    primes = generator.choice([each for each in MODULI if each[0] == prime])
    inputs, noises = generator.choice([(1, 1), (1, 5), (2, 1), (3, 1), (4, 1), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1)])
    lines = generator.choice([1, 1, 1, 3])
    channels = generator.choice([1, 2, 3, 4, 5, 17, 64, 131]) if positions < 300 else generator.choice([1, 3, 9])
    examples = generator.randint(1, 3 * inputs)
    kind = generator.choice(["dense", "subtracted", "added", "summed"])
    if kind == "summed":
        inputs, noises, examples = 1, generator.choice([1, 3, 5, 14, 15]), generator.choice([1, 1, 2])
    groups, answers = -(-examples // inputs), inputs + noises
    sign = -1 if kind == "subtracted" else 1
    matrix = (
        drawn_matrix(generator, inputs, answers, prime)
        if kind == "dense"
        else [[int(i == j) for i in range(inputs)] + [sign] * noises for j in range(inputs)]
    )
    form = Form(tuple(map(tuple, matrix)), ((0, prime - 1),) * answers, prime, True)
    sources = [placed(generator, residues((groups, lines, channels, positions), prime)) for _ in range(answers)]
    reps, exponent = generator.choice([1, 2]), generator.choice([-3, 9, 20])
    how = Weighing(
        channels=entries(generator, (reps, channels), 22),
        rows=entries(generator, (reps, examples * lines), 23),
        positions=positions,
        primes=primes,
        longest=generator.choice([at_once(primes, 22), min(7, at_once(primes, 22))]),
        often=generator.choice([1, at_once(primes, 23)]),
    )
    memory = torch.full((examples * lines * channels * positions + 9,), -7.0)
    start = generator.randint(0, 8)
    floats = memory[start : len(memory) - 9 + start].view(examples, lines, channels, positions)
    before = [source.clone() for source in sources]
    label = (prime, inputs, noises, examples, lines, channels, positions, reps, how.longest, how.often, kind)
    bias = torch.randn(channels) if generator.random() < 0.5 else None
    limits = generator.choice([None, (0.0, math.inf), (0.0, 6.0), (-1.0, 1.0)])
    scaling = Affine(torch.randn(channels), torch.randn(channels)) if generator.random() < 0.5 else None
    if kind == "summed" and generator.random() < 0.7:
        bias = limits = scaling = None
    found = compiled_unmasking.unmask(function, form, sources, floats, 2.0**-exponent, how, bias, limits, scaling)
    assert found is not None, label
    outside, sums = found
    wanted, weighed = expected(form, sources, examples, exponent, how)
    wanted = wanted if bias is None else wanted + bias[:, None]
    wanted = wanted if scaling is None else wanted * scaling.scale[:, None] + scaling.shift[:, None]
    wanted = wanted if limits is None else wanted.clamp(*limits)
    assert outside == [], label
    assert torch.equal(floats, wanted), label
    assert torch.equal(sums, weighed.view(sums.shape)), label
    assert memory[:start].eq(-7).all(), label
    assert memory[start + floats.numel() :].eq(-7).all(), label
    assert all(torch.equal(*pair) for pair in zip(sources, before, strict=True)), label


@pytest.mark.parametrize("positions", POSITIONS)
def test_it_is_what_unmasking_and_weighing_give(function, positions, full):
    generator = random.Random(positions)
    torch.manual_seed(positions)
    for _ in range(60 if full else 8):
        try_one(function, generator, positions)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("channels", "examples"), [(2047, 8), (2500, 2), (40, 63), (40, 66)])
def test_the_largest_sums_are_exact(function, sign, channels, examples, added):
    """Every result and every weight as large as it can be; more channels and rows than one way of summing holds."""
    prime, primes = 2**28 - 57, MODULI[0]
    other = 1 if added else -1
    form = Form(((1, 0, other), (0, 1, other)), ((0, prime - 1),) * 3, prime, True)
    groups, half = -(-examples // 2), prime // 2
    shape = (groups, 1, channels, 33)
    largest = (half, half, 0) if sign > 0 else (0, 0, prime - half if added else half)
    sources = [torch.full(shape, value, dtype=torch.int32) for value in largest]
    how = Weighing(
        channels=torch.full((2, channels), -(2.0**21), dtype=torch.float64),
        rows=torch.full((2, examples), -(2.0**22), dtype=torch.float64),
        positions=33,
        primes=primes,
        longest=min(8, at_once(primes, 22)),
        often=1,
    )
    floats = torch.empty(examples, 1, channels, 33)
    found = compiled_unmasking.unmask(function, form, sources, floats, 1.0, how)
    assert found is not None
    wanted, weighed = expected(form, sources, examples, 0, how)
    assert found[0] == []
    assert torch.equal(floats, wanted)
    assert torch.equal(found[1], weighed.view(found[1].shape))
    assert floats.eq(sign * half).all()


def weighed_total(function, sources, channels=None):
    """The sum of these, (channel, position): places outside the field, floats, and (rep, position) modulo the prime."""
    prime, (_, count, positions) = 2**28 - 57, sources[0].shape
    form = Form(((1,) * len(sources),), ((0, prime - 1),) * len(sources), prime, True)
    one = torch.ones(2, 1, dtype=torch.float64)
    how = Weighing(
        channels=one.expand(2, count) if channels is None else channels,
        rows=one,
        positions=positions,
        primes=(prime,),
        longest=at_once((prime,), 22),
        often=at_once((prime,), 23),
    )
    floats = torch.full((1, count, positions), math.nan)
    outside, sums = compiled_unmasking.unmask(function, form, sources, floats, 1.0, how)
    return outside, floats[0], sums[0].view(2, positions)


@pytest.mark.parametrize("answers", [1, 6, 7, 15, 16])
@pytest.mark.parametrize("value", [1, 2**27 - 29, 2**27 - 28, 2**28 - 58])
def test_sums_of_any_number_of_answers_are_exact(function, answers, value):
    prime = 2**28 - 57
    sources = [torch.full((1, 5, 259), value, dtype=torch.int32) for _ in range(answers)]
    weights = torch.tensor([[1.0, -(2.0**21), 3.0, 0.0, 2.0**21 - 1], [5.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    outside, floats, sums = weighed_total(function, sources, weights)
    half = prime // 2
    total = (answers * value + half) % prime - half
    assert outside == []
    assert floats.eq(float(torch.tensor(total, dtype=torch.float32))).all()
    wanted = [(int(row.sum()) * total + half) % prime - half for row in weights]
    assert sums.eq(torch.tensor(wanted, dtype=torch.int32)[:, None]).all()


@pytest.mark.parametrize("value", [-1, 2**28 - 57, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [0, 258, 259 * 3 + 15, 259 * 5 - 1])
def test_a_sum_names_every_answer_outside_the_field(function, value, place):
    sources = [torch.full((1, 5, 259), 2**28 - 58, dtype=torch.int32) for _ in range(6)]
    assert weighed_total(function, sources)[0] == []  # the control: the largest residue
    sources[1].view(-1)[place] = value
    assert weighed_total(function, sources)[0] == [1]
    sources[5].view(-1)[0] = value
    assert weighed_total(function, sources)[0] == [1, 5]


def test_a_sum_of_many_positions_is_made_here_if_it_is_made_in_strips(function):
    if not compiled_unmasking._in_strips():
        pytest.skip("another processor")
    torch.manual_seed(3)
    sources = [residues((1, 130, 8800), 2**28 - 57) for _ in range(6)]  # past the cache, in strips
    outside, floats, sums = weighed_total(function, sources)
    integers = torch.empty(1, *sources[0].shape, dtype=torch.int32)
    reference.combine(((1,) * 6,), sources, 2**28 - 57, out=integers, centred=True)
    half = (2**28 - 57) // 2
    assert outside == []
    assert torch.equal(floats, integers[0, 0].float())
    wanted = (integers[0, 0].long().sum(0) + half).remainder(2**28 - 57) - half
    assert torch.equal(sums, wanted.to(torch.int32).expand(2, -1))
    sources[2][0, 0, 0] = sources[4][0, -1, -1] = 2**28 - 57  # in the first strip, and in the last
    assert weighed_total(function, sources)[0] == [2, 4]


@pytest.mark.parametrize("other", [-1, 1])
def test_results_beyond_the_cache_are_the_same(function, other):
    generator = random.Random(1)
    torch.manual_seed(1)
    prime, primes = 2**28 - 57, MODULI[0]
    matrix = tuple((*[int(i == j) for i in range(4)], other) for j in range(4))
    form = Form(matrix, ((0, prime - 1),) * 5, prime, True)
    sources = [residues((2, 1, 67, 2500), prime) for _ in range(5)]
    how = Weighing(
        channels=entries(generator, (2, 67), 22),
        rows=entries(generator, (2, 7), 23),
        positions=2500,
        primes=primes,
        longest=at_once(primes, 22),
        often=at_once(primes, 23),
    )
    floats = torch.empty(7, 1, 67, 2500)
    assert floats.numel() > 1 << 20
    found = compiled_unmasking.unmask(function, form, sources, floats, 0.25, how)
    wanted, weighed = expected(form, sources, 7, 2, how)
    assert found is not None
    assert torch.equal(floats, wanted)
    assert torch.equal(found[1], weighed.view(found[1].shape))


def never(*_: object) -> None:
    raise AssertionError("the library was called")


def test_other_operands_never_reach_the_library():
    prime = 2**28 - 57
    form = Form(((1, -1),), ((0, prime - 1),) * 2, prime, True)
    sources = [torch.zeros(3, 4, 5, dtype=torch.int32) for _ in range(2)]
    floats = torch.zeros(3, 4, 5)

    def how(**changed: object) -> Weighing:
        channels, rows = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
        given = {"channels": channels, "rows": rows, "positions": 5, "primes": (prime,), "longest": 8, "often": 8}
        return Weighing(**{**given, **changed})

    nine = Form(((1,) * 10,) * 9, ((0, prime - 1),) * 10, prime, True)
    for wrong in (
        (form, [each.long() for each in sources], floats, how()),
        (form, [each[:, :3] for each in sources], floats, how()),
        (form, [each.transpose(1, 2).contiguous().transpose(1, 2) for each in sources], floats, how()),
        (form, sources, floats.double(), how()),
        (form, sources, floats.transpose(1, 2).contiguous().transpose(1, 2), how()),
        (form, sources, floats[:2], how()),
        (form, sources[:1], floats, how()),
        (form, sources, floats, how(positions=7)),
        (form, sources, floats, how(rows=torch.zeros(2, 4, dtype=torch.float64))),
        (form, sources, floats, how(channels=torch.zeros(3, 4, dtype=torch.float64))),
        (form, sources, floats, how(channels=torch.zeros(2, 4), rows=torch.zeros(2, 3))),
        (Form(form.matrix, form.ranges, prime, False), sources, floats, how()),
        (nine, sources * 5, floats, how()),
    ):
        *operands, weighing = wrong
        assert compiled_unmasking.unmask(never, *operands, 1.0, weighing) is None
    far = [torch.zeros(1, 4, 4096, dtype=torch.int32) for _ in range(2)]
    one = how(positions=4096, rows=torch.zeros(2, 1, dtype=torch.float64))
    assert compiled_unmasking.unmask(never, form, far, torch.zeros(1, 4, 4096), 1.0, one) is None
    for bias in (torch.zeros(5), torch.zeros(4).double(), torch.zeros(1, 4)):
        assert compiled_unmasking.unmask(never, form, sources, floats, 1.0, how(), bias) is None
        scaling = Affine(torch.zeros(4), bias)
        assert compiled_unmasking.unmask(never, form, sources, floats, 1.0, how(), scaling=scaling) is None


def test_without_the_library_nothing_is_unmasked_this_way(monkeypatch):
    monkeypatch.setattr(compiled_unmasking, "chosen", lambda: None)
    one = torch.ones(1, 1, dtype=torch.float64)
    how = Weighing(channels=one, rows=one, positions=1, primes=(2**28 - 57,), longest=8, often=8)
    sources, floats = [torch.ones(1, 1, dtype=torch.int32)], torch.zeros(1, 1)
    assert kernels.unmask_weighed([[1]], sources, 2**28 - 57, 0, floats=floats, weighing=how) is None
    assert not floats.any()


def test_what_is_handed_over_is_laid_out_as_in_the_c_file():
    assert fields_of(compiled_unmasking._Unmasking) == fields_in("unmasking.c", "unmasking")


GUARDED = (
    PRELUDE
    + """
from darknight.kernels import compiled_unmasking as unmasking
from darknight.kernels.compiled_field import Form
from darknight.kernels.compiled_residues import array_of

beyond, prime = int(sys.argv[1]), 2**28 - 57
form = Form(((1, 0, 0, -1), (0, 1, 0, -1), (0, 0, 1, -1)), ((0, prime - 1),) * 4, prime, True)
for kind in sys.argv[2:]:
    function = unmasking.chosen("" if kind == "chosen" else kind)
    for examples, lines, channels, positions in (
        (1, 1, 1, 1), (4, 3, 50, 1), (5, 1, 37, 9), (3, 1, 33, 256), (7, 1, 5, 257), (6, 1, 70, 2600)
    ):
        groups, width = -(-examples // 3), lines * channels * positions
        sources = (ctypes.c_void_p * 4)(*(at_the_end(4 * groups * width) for _ in range(4)))
        sources[0] += beyond
        strides = (ctypes.c_int64 * 4)(*[width] * 4)
        out = at_the_end(4 * 2 * 2 * positions)
        what = unmasking._Unmasking(
            form.structure(), ctypes.addressof(sources), ctypes.addressof(strides), at_the_end(4 * examples * width),
            0.5, *(at_the_end(4 * channels) for _ in range(3)), 0.0, 6.0, 1, at_the_end(4 * 4),
            examples, groups, lines, channels, positions, at_the_end(8 * 2 * channels),
            at_the_end(8 * 2 * examples * lines), 2, 16, 8, array_of((prime, 2**28 - 89)), 2, out)
        function(ctypes.byref(what))
print("done")
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guarded memory is arranged for Linux")
def test_nothing_is_read_or_written_beyond_the_end(tmp_path: Path):
    if compiled_unmasking.chosen() is None:
        pytest.skip("nothing was compiled")
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)
    kinds = [kind or "chosen" for kind in KINDS if usable(kind)]

    def run(beyond: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(beyond), *kinds]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run(0)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert run(4).returncode < 0  # one element further, and the process dies: the test can fail
