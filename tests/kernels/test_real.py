"""Real arithmetic: what is compiled gives what the reference gives, where it says so to the last bit."""

import math
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from darknight.coding import Real, Scheme, draw_code
from darknight.coding import real as coding
from darknight.kernels import compiled_real, reference_real
from darknight.kernels import real as kernels
from darknight.kernels.compiled_real import Library
from darknight.ops import Conv
from darknight.randomness import Randomness
from kernels.guarded import PRELUDE

FLOATS = [torch.float32, torch.float64]
LENGTHS = [1, 2, 3, 7, 8, 9, 31, 64, 65, 255, 511, 512, 513, 1025, 3000]
SCHEMES = {
    "paper": Scheme.paper(),
    "dense": Scheme(inputs=4, colluders=1, arithmetic=Real(noise_std=2e4), mixing="dense"),
    "systematic": Scheme(inputs=3, colluders=1, spares=1, arithmetic=Real(noise_std=2e4)),
    "two colluders": Scheme(inputs=2, colluders=2, arithmetic=Real(noise_std=1e3, noise_mean=0.5)),
}
WORDS = (-(2**63), 2**63 - 1)
NEVER = Library(*[lambda *_: pytest.fail("the library was called")] * len(fields(Library)))


def built(kind: str) -> Library:
    found = Library.loaded(kind)
    if found is None and shutil.which("cc") is None:
        pytest.skip("no C compiler: nothing was compiled")
    assert found is not None, "real.c was not built from these sources: install the package again"
    return found


@pytest.fixture(scope="module", params=["", "avx2_", "plain_"], ids=["best", "avx2", "plain"])
def library(request) -> Library:
    """The library's functions, as this processor runs them best, and as any would."""
    if request.param == "avx2_" and (torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX")):
        pytest.skip("this processor has no AVX2")
    return built(request.param)


def placed(generator: random.Random, values: Tensor) -> Tensor:
    """The same values in memory that begins at odd places, or not."""
    start = generator.choice([0, 0, 1, 3, 7])
    return torch.empty(values.numel() + start, dtype=values.dtype)[start:].view(values.shape).copy_(values)


def values_within(bound: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of all magnitudes, often the largest, zero, and halves of steps of a grid."""
    values = torch.randn(shape, dtype=torch.float64) * 2.0 ** torch.randint(-45, 1, shape)
    pick = torch.rand(shape)
    values[pick < 0.1] = 0.0
    values[pick > 0.9] = bound
    values[pick > 0.95] = -bound
    return (values.clamp(-1, 1) * bound).clamp_(-bound, bound).to(dtype)


def operands(name: str, seed: int, examples: int, length: int, dtype: torch.dtype, bound: float = 3.0):
    """What coding.real would call the kernel with: values, and the rest by name."""
    scheme = SCHEMES[name]
    mixing = draw_code(scheme, Randomness(bytes(31) + bytes([seed])).fresh()).masking[seed % 2 * (name != "paper")]
    grid = coding.grid_for(mixing, scheme.arithmetic, bound)
    groups = -(-examples // mixing.inputs)
    noise = (torch.randn(mixing.colluders, groups, length, dtype=torch.float64) * grid.std + grid.mean).to(torch.int64)
    fractions = torch.randint(0, mixing.divisor, noise.shape, dtype=torch.int32) if mixing.divisor > 1 else None
    return values_within(bound, (examples, length), dtype), {
        "exponent": grid.exponent,
        "bound": bound,
        "data": [[float(value) for value in row] for row in mixing.data],
        "carriers": mixing.noise,
        "noise": noise,
        "fractions": fractions,
        "divisor": mixing.divisor,
    }


# --- masking ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("seed", range(2))
def test_encoding_agrees_with_the_reference(library, name, wire, seed, full):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    for trial in range(80 if full else 12):
        examples, length = generator.randint(1, 9), generator.choice(LENGTHS)
        values, rest = operands(name, seed, examples, length, generator.choice(FLOATS))
        values, noise = placed(generator, values), placed(generator, rest["noise"])
        shape = (len(rest["data"]), *noise.shape[1:])
        outs, expected = placed(generator, torch.full(shape, -7.0, dtype=wire)), torch.empty(shape, dtype=wire)
        found = compiled_real.encode(library, values, **{**rest, "noise": noise}, outs=outs)
        wanted = reference_real.encode(values, **rest, outs=expected)
        label = (trial, examples, length, values.dtype)
        assert found is not None
        assert found[1], label
        assert wanted[1], label
        assert found[0].dtype == values.dtype
        assert torch.equal(found[0], wanted[0]), label
        assert torch.equal(outs, expected), label


@pytest.mark.parametrize("name", SCHEMES)
def test_encoding_is_what_the_formula_says(library, name):
    """By the definition, in Python's integers and fractions; sums of data are exact in the systematic code alone."""
    torch.manual_seed(0)
    values, rest = operands(name, 0, 5, 9, torch.float32)
    outs = torch.empty(len(rest["data"]), *rest["noise"].shape[1:], dtype=torch.float64)
    on_grid, _ = compiled_real.encode(library, values, **rest, outs=outs)
    step, inputs, divisor = Fraction(2) ** -rest["exponent"], len(rest["data"][0]), rest["divisor"]
    steps = [[round(Fraction(value) / step) for value in row] for row in values.tolist()]
    assert on_grid.tolist() == [[float(count * step) for count in row] for row in steps]
    for row, (data, carriers) in enumerate(zip(rest["data"], rest["carriers"], strict=True)):
        for group in range(outs.shape[1]):
            for place in range(outs.shape[2]):
                mine = [steps[e][place] if e < 5 else 0 for e in range(group * inputs, (group + 1) * inputs)]
                mixed = sum(Fraction(c) * x for c, x in zip(data, mine, strict=True))
                total = sum(c * int(r[group, place]) for c, r in zip(carriers, rest["noise"], strict=True))
                if rest["fractions"] is not None:
                    centred = [int(f[group, place]) - divisor // 2 for f in rest["fractions"]]
                    carried = sum(c * f for c, f in zip(carriers, centred, strict=True))
                    total += (2 * carried + divisor) // (2 * divisor)
                near = {float(Fraction(float(total + count)) * step) for count in (math.floor(mixed), math.ceil(mixed))}
                assert float(outs[row, group, place]) in near


@pytest.mark.parametrize("strange", [3.000001, -3.5, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_beyond_the_bound_is_noticed_anywhere(library, strange, dtype):
    for length, place in [(5, 0), (5, 4), (513, 511), (513, 512), (1030, 700)]:
        values, rest = operands("paper", 0, 3, length, dtype)
        outs = torch.empty(len(rest["data"]), 2, length)
        assert compiled_real.encode(library, values, **rest, outs=outs)[1]
        values[2, place] = strange
        assert not compiled_real.encode(library, values, **rest, outs=outs)[1]
        assert not reference_real.encode(values, **rest, outs=outs)[1]


@pytest.mark.parametrize("bound", [2.0**-90, 0.7, 2.0**90])
def test_what_is_on_the_grid_stays_there_and_is_masked_the_same_again(library, bound):
    """A share that is made once more from what was kept is the same share."""
    values, rest = operands("systematic", 1, 4, 700, torch.float32, bound)
    first, again = (torch.empty(len(rest["data"]), 2, 700, dtype=torch.float64) for _ in range(2))
    kept, within = compiled_real.encode(library, values, **rest, outs=first)
    assert within
    assert not torch.equal(kept, values)
    twice, _ = compiled_real.encode(library, kept, **rest, outs=again)
    assert torch.equal(twice, kept)
    assert torch.equal(first, again)
    one = torch.empty(1, 2, 700, dtype=torch.float64)  # of one worker alone
    rows = {"data": rest["data"][2:3], "carriers": rest["carriers"][2:3]}
    compiled_real.encode(library, kept, **{**rest, **rows}, outs=one)
    assert torch.equal(one[0], first[2])


@pytest.mark.parametrize("start", [0, 1, 3])
def test_what_goes_past_the_cache_is_the_same(library, start):
    length = 300_003
    values, rest = operands("paper", 0, 5, length, torch.float32)
    size = len(rest["data"]) * 3 * length
    memory = torch.full((start + size + 1,), -7.0)
    outs, expected = memory[start:-1].view(-1, 3, length), torch.empty(len(rest["data"]), 3, length)
    found, _ = compiled_real.encode(library, values, **rest, outs=outs)
    assert torch.equal(found, reference_real.encode(values, **rest, outs=expected)[0])
    assert torch.equal(outs, expected)
    assert memory[:start].eq(-7).all()
    assert float(memory[-1]) == -7
    matrix, answers = [[0.25, -1.5, 3.0], [1.0, 0.0, -1.0]], list(expected[:3])
    back = compiled_real.decode(library, matrix, answers, examples=5, dtype=torch.float32)
    assert torch.equal(back, reference_real.decode(matrix, answers, examples=5, dtype=torch.float32))


# --- Gaussians --------------------------------------------------------------------------------------------------------
def words_of(count: int) -> Tensor:
    """Any, and those where a radius or a quarter of the turn ends."""
    words = torch.randint(*WORDS, (2 * ((count + 1) // 2),), dtype=torch.int64)
    edges = [place + off for place in (0, 1 << 50, 1 << 51, 1 << 52, 3 << 51, 1 << 53) for off in (-1, 0, 1)]
    for half in words.chunk(2):
        some = min(len(half), len(edges))
        half[:some] = torch.tensor(edges[:some])
    return words


@pytest.mark.parametrize("count", [1, 2, 3, 8, 37, 511, 512, 513, 1023, 1025, 50_001])
def test_gaussians_are_the_references_up_to_rounding(library, count):
    """Before rounding they are within 2^-45 of a standard deviation: at 2^46 of them, one or two steps."""
    torch.manual_seed(count)
    words, uniforms = words_of(count), torch.randint(*WORDS, (count,), dtype=torch.int64)
    for std, lower, mean in [(2.0**46, 0, 0), (2.0**29.3, 25, -(2**40)), (2.0**29.9, 1, 7), (1.0, 0, 5)]:
        found, expected = (torch.empty(count, dtype=torch.int64) for _ in range(2))
        lows = uniforms if lower else None
        assert compiled_real.gaussian(library, words, lows, std, lower, mean, out=found) is found
        reference_real.gaussian(words, lows, std, lower, mean, out=expected)
        steps = (found - expected) / 2**lower
        assert float(steps.abs().max()) <= max(1.0, std * 2.0**-45)
        if lower:  # the lower bits are the uniforms', exactly
            assert torch.equal((found - mean + 2 ** (lower - 1)) % 2**lower, uniforms % 2**lower)
        if std < 2.0**30:
            assert float(steps.ne(0).double().mean()) <= 1e-3


def test_every_variant_makes_the_same_gaussians():
    """A share is made again from its noise, perhaps after a restart on another processor."""
    torch.manual_seed(0)
    words, uniforms = words_of(20_001), torch.randint(*WORDS, (20_001,), dtype=torch.int64)
    found = []
    for kind in ("", "plain_"):
        out = torch.empty(20_001, dtype=torch.int64)
        compiled_real.gaussian(built(kind), words, uniforms, 2.0**29.5, 20, 3, out=out)
        found.append(out)
    assert torch.equal(*found)


# --- unmasking --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(3))
def test_decoding_agrees_with_the_reference(library, dtype, seed, full):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    for trial in range(120 if full else 25):
        rows, count, groups = (
            generator.randint(1, 5),
            generator.choice([1, 2, 3, 4, 5, 6, 9, 13]),
            generator.randint(1, 3),
        )
        length, result = generator.choice(LENGTHS), generator.choice(FLOATS)
        entries = generator.choice([[0.0, 1.0, -1.0], [1.0], [0.3, -1.7, 0.0, 2.0**-40, 1e6]])
        matrix = [[generator.choice(entries) for _ in range(count)] for _ in range(rows)]
        sources = [placed(generator, torch.randn(groups, length, dtype=dtype) * 1e4) for _ in range(count)]
        examples = generator.randint((groups - 1) * rows, groups * rows)
        found = compiled_real.decode(library, matrix, sources, examples=examples, dtype=result)
        expected = reference_real.decode(matrix, sources, examples=examples, dtype=result)
        assert found is not None
        assert torch.equal(found, expected), (trial, rows, count, groups, length)


def test_decoding_is_a_product_of_matrices():
    matrix, sources = (
        [[2.0, -3.0], [0.5, 0.0]],
        [torch.tensor([[1.0, 2.0], [5.0, 6.0]]), torch.tensor([[1.0, 1.0], [0.0, 4.0]])],
    )
    found = kernels.decode(matrix, sources, examples=3, dtype=torch.float64)
    assert found.tolist() == [[-1.0, 1.0], [0.5, 1.0], [10.0, 0.0]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [1, 5, 511, 513, 2000])
def test_sums_beyond_their_tolerance_are_noticed_anywhere(library, dtype, length):
    torch.manual_seed(length)
    first, second = torch.randn(2, length, dtype=dtype).clamp(-3, 3)
    third = (first.double() - 2 * second.double()).to(dtype)
    sources, weights = [first, second, third], [1.0, -2.0, -1.0]
    assert compiled_real.within(library, weights, sources, 1e-5) is True
    assert reference_real.within(weights, sources, 1e-5)
    for place in {0, length // 2, length - 1}:
        for strange in (100.0, -100.0, math.nan, math.inf):
            wrong = third.clone()
            wrong[place] = strange
            assert compiled_real.within(library, weights, [first, second, wrong], 1e-5) is False
            assert not reference_real.within(weights, [first, second, wrong], 1e-5)


def test_a_source_without_weight_is_looked_at_too(library):
    sources = [torch.zeros(7), torch.tensor([0.0] * 6 + [math.nan])]
    assert compiled_real.within(library, [1.0, 0.0], sources, 1.0) is None
    assert not kernels.within([1.0, 0.0], sources, 1.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 7), (3, 2, 16), (2, 5, 7, 9), (1, 1, 100)])
def test_sizes_are_the_references_up_to_rounding(library, dtype, shape):
    torch.manual_seed(0)
    values = torch.randn(shape, dtype=dtype)
    largest, square = compiled_real.sizes(library, values)
    expected = reference_real.sizes(values)
    assert largest == expected[0]
    assert square == pytest.approx(expected[1], rel=1e-13)


def test_sizes_are_what_they_say():
    assert kernels.sizes(torch.tensor([[[1.0, 2.0], [0.0, -4.0]]])) == (4.0, 8.0)
    assert kernels.sizes(torch.empty(0, 3)) == (0.0, 0.0)


def test_threads_do_not_disturb_each_other(library):
    values, rest = operands("paper", 0, 6, 5000, torch.float32)

    def run(_: int) -> Tensor:
        outs = torch.empty(len(rest["data"]), 3, 5000)
        compiled_real.encode(library, values, **rest, outs=outs)
        return outs

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(20)))
    assert all(torch.equal(outs, found[0]) for outs in found[1:])


# --- weighed sums -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "groups", "reps"),
    [
        ((1, 1, 8), 1, 1),
        ((2, 5, 9), 1, 20),
        ((3, 6, 4, 7), 3, 10),
        ((2, 12, 127), 2, 4),
        ((1, 7, 128), 1, 32),
        ((2, 3, 11, 13, 2), 1, 6),
        ((2, 4, 1000), 4, 3),
    ],
)
def test_weighed_sums_are_the_ops_up_to_rounding(library, dtype, shape, groups, reps):
    torch.manual_seed(0)
    values, vectors = torch.randn(shape, dtype=dtype), torch.randn(reps, shape[1], dtype=torch.float64)
    ones = (1,) * (len(shape) - 2)
    op = Conv.make(ones, groups=groups)
    folded = compiled_real.fold(library, values, vectors, groups)
    expected = op.fold_channels(values.double(), vectors, groups)
    torch.testing.assert_close(folded, expected, rtol=0, atol=1e-13 * shape[1])
    met = compiled_real.meet(library, values, folded, groups)
    products = op.project_grad_weight_inputs(values.double(), folded, (groups * 5, shape[1] // groups, *ones))
    torch.testing.assert_close(met.view(reps, -1, *ones), products, rtol=1e-11, atol=1e-11)


def test_weighed_sums_are_what_they_say(library):
    values = torch.arange(16.0).view(1, 2, 8)
    folded = compiled_real.fold(library, values, torch.tensor([[1.0, 10.0]], dtype=torch.float64), 1)
    assert folded[0, 0].tolist() == [float(i + 10 * (i + 8)) for i in range(8)]
    weights = torch.eye(8, dtype=torch.float64)[None, 2:4].contiguous()
    assert compiled_real.meet(library, values, weights, 1).tolist() == [[2.0, 10.0], [3.0, 11.0]]


def test_other_weighed_sums_are_left_to_the_op():
    x, u, f = torch.zeros(2, 4, 9), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(2, 6, 9, dtype=torch.float64)
    for values, vectors, groups in (
        (x.half(), u, 1),
        (x, u.float(), 1),
        (x, u[:, :3].contiguous(), 1),
        (x, u, 3),
        (x, u.repeat(11, 1), 1),
        (x[:, :, :7].contiguous(), u, 1),
        (x[:, :, ::2], u, 1),
        (x[0], u, 1),
    ):
        assert compiled_real.fold(NEVER, values, vectors, groups) is None
    for values, folded, groups in (
        (x, f.float(), 1),
        (x, f[:1], 1),
        (x, f[:, :, :8].contiguous(), 1),
        (x, f, 4),
        (x, f[:, :0], 1),
        (x.transpose(0, 1), f, 1),
        (x, f[0], 1),
    ):
        assert compiled_real.meet(NEVER, values, folded, groups) is None


def try_everything(library: Library) -> None:
    """What the sanitizers watch."""
    for name in SCHEMES:
        for wire in FLOATS:
            test_encoding_agrees_with_the_reference(library, name, wire, 1, False)
    test_what_is_beyond_the_bound_is_noticed_anywhere(library, math.nan, torch.float32)
    test_what_is_beyond_the_bound_is_noticed_anywhere(library, math.inf, torch.float64)
    test_what_goes_past_the_cache_is_the_same(library, 1)
    for count in (1, 37, 513, 1025):
        test_gaussians_are_the_references_up_to_rounding(library, count)
    for dtype in FLOATS:
        test_decoding_agrees_with_the_reference(library, dtype, 1, False)
        test_sums_beyond_their_tolerance_are_noticed_anywhere(library, dtype, 513)
        test_sizes_are_the_references_up_to_rounding(library, dtype, (2, 5, 7, 9))
        for shape, groups, reps in (((2, 12, 127), 2, 4), ((1, 7, 129), 1, 32), ((3, 6, 4, 7), 3, 11)):
            test_weighed_sums_are_the_ops_up_to_rounding(library, dtype, shape, groups, reps)


# --- what it is not made for ------------------------------------------------------------------------------------------
def test_other_encodings_never_reach_the_library():
    values, rest = operands("systematic", 0, 4, 5, torch.float32)
    outs = torch.empty(len(rest["data"]), 2, 5)
    for wrong in (
        {"values": values.half()},
        {"values": values.t().contiguous().t()},
        {"values": values[:3, :4]},
        {"values": values[:3].repeat(3, 1)},
        {"outs": outs[:2]},
        {"outs": outs.half()},
        {"outs": outs.transpose(0, 1).contiguous().transpose(0, 1)},
        {"noise": rest["noise"].int()},
        {"noise": rest["noise"][:, :1]},
        {"fractions": rest["fractions"].long()},
        {"fractions": rest["fractions"][:, :1]},
        {"divisor": 1 << 40},
        {"data": rest["data"][:2]},
        {"carriers": rest["carriers"][:2]},
        {"data": [[1e9] * 3] * len(rest["data"])},
        {"data": [[math.nan] * 3] * len(rest["data"])},
        {"carriers": [[2**49]] * len(rest["data"])},
        {"exponent": 60},
    ):
        made = {"values": values, **rest, "outs": outs, **wrong}
        assert compiled_real.encode(NEVER, made.pop("values"), **made) is None, list(wrong)


def test_other_operands_never_reach_the_library():
    x, words = torch.zeros(2, 5), torch.zeros(6, dtype=torch.int64)
    for matrix, sources, examples, dtype in (
        ([[1.0, 1.0]], [x, x.double()], 2, torch.float32),
        ([[1.0, 1.0]], [x, x[:, :4]], 2, torch.float32),
        ([[1.0, 1.0]], [x, x[:1]], 2, torch.float32),
        ([[1.0]], [x, x], 2, torch.float32),
        ([[1.0, 1.0]], [x, x], 3, torch.float32),
        ([[1.0, 1.0]], [x, x], 2, torch.float16),
        ([[1.0, 1.0]], [x.int(), x.int()], 2, torch.float32),
    ):
        assert compiled_real.decode(NEVER, matrix, sources, examples=examples, dtype=dtype) is None
    assert compiled_real.within(NEVER, [1.0], [x, x], 1.0) is None
    assert compiled_real.within(NEVER, [1.0, 1.0], [x, x.t()], 1.0) is None
    assert compiled_real.sizes(NEVER, x.t()) is None
    assert compiled_real.sizes(NEVER, x[0]) is None
    assert compiled_real.sizes(NEVER, x[:0]) is None
    out = torch.zeros(6, dtype=torch.int64)
    for drawn in (
        (words.int(), None, 1.0, 0, 0, out),
        (words[:4], None, 1.0, 0, 0, out),
        (words, None, 1.0, 3, 0, out),
        (words, words[:5], 1.0, 3, 0, out),
        (words, None, 2.0**50, 0, 0, out),
        (words, None, 1.0, 0, 1 << 62, out),
    ):
        assert compiled_real.gaussian(NEVER, *drawn[:-1], out=drawn[-1]) is None


def test_without_the_library_the_reference_does_everything(monkeypatch):
    monkeypatch.setattr(kernels, "chosen", lambda: None)
    values, rest = operands("paper", 0, 3, 7, torch.float32)
    outs, expected = (torch.empty(len(rest["data"]), 2, 7) for _ in range(2))
    assert kernels.encode(values, **rest, outs=outs)[1]
    reference_real.encode(values, **rest, outs=expected)
    assert torch.equal(outs, expected)
    assert kernels.decode([[1.0]], [values], examples=3, dtype=torch.float32).tolist() == values.tolist()
    assert kernels.within([1.0], [values], 3.0)
    assert kernels.sizes(values)[0] == 3.0
    words = torch.full((4,), 1 << 52, dtype=torch.int64)
    drawn = kernels.gaussian(words, None, 100.0, 0, 0, out=torch.empty(4, dtype=torch.int64))
    assert drawn.tolist() == [-118, -118, 0, 0]  # sqrt(2 log 2), half a turn on


# --- beyond the end ---------------------------------------------------------------------------------------------------
GUARDED = (
    PRELUDE
    + """
from darknight.kernels import compiled_real as real

beyond = int(sys.argv[1])
for kind in ("", "plain_"):
    library = real.Library.loaded(kind)
    for examples, n in ((1, 1), (4, 7), (5, 512), (3, 513), (7, 1501), (3, 400_003)):
        for wide in (0, 1):
            groups, size = -(-examples // 3), 8 if wide else 4
            x, grid = at_the_end(size * examples * n), at_the_end(size * examples * n)
            noise, fractions = at_the_end(8 * groups * n), at_the_end(4 * groups * n)
            outs = (ctypes.c_void_p * 2)(at_the_end(size * groups * n), at_the_end(size * groups * n))
            library.encode(ctypes.byref(real._Masking(
                x=x + beyond, grid=grid, data=real._doubles([[1, 0, 2], [0.5, 1, 1]]), noise=noise,
                carriers=(real._NUMBER * 2)(1, 3), fractions=fractions, outs=outs, examples=examples, inputs=3,
                noises=1, rows=2, groups=groups, n=n, divisor=3, scale=2.0, step=0.5, bound=1.0,
                wide=wide, wide_outs=wide, last=n)))
            library.decode(ctypes.byref(real._Unmasking(
                sources=outs, matrix=real._doubles([[1, 2], [0, 1], [3, 0]]), out=x, count=2, rows=3, n=n,
                groups=groups, examples=examples, wide=wide, wide_out=wide, last=n)))
            library.compare(ctypes.byref(real._Parity(
                sources=outs, weights=real._doubles([[1, 2]]), count=2, n=groups * n, tolerance=1e9, wide=wide)))
            library.squares(ctypes.byref(real._Measure(
                x=x, sums=at_the_end(8), outer=examples, channels=1, inner=n, wide=wide, last=1)))
            vectors, folded, met = at_the_end(8 * 7), at_the_end(8 * examples * 7 * n), at_the_end(8 * 7)
            calls = (library.fold, vectors, folded, examples), (library.meet, folded, met, 1)
            for function, other, out, last in calls:
                function(ctypes.byref(real._Folding(
                    x=x, vectors=other, out=out, outer=examples, groups=1, channels=1, inner=n, reps=7, wide=wide,
                    last=last)))
        count, pairs = n, (n + 1) // 2
        library.gaussian(ctypes.byref(real._Drawing(
            words=at_the_end(16 * pairs), uniforms=at_the_end(8 * count), out=at_the_end(8 * count), count=count,
            pairs=pairs, mean=0, scale=4.0, lower=2, last=pairs)))
print("done")
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guarded memory is arranged for Linux")
def test_nothing_is_read_or_written_beyond_the_end(tmp_path: Path):
    built("")
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)

    def run(beyond: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(beyond)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run(0)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert run(4).returncode < 0  # one element further, and the process dies: the test can fail
