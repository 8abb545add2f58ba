"""Every kernel on several threads: the bits that one thread gives, over odd shapes, tails and alignments."""

import random
import threading
from collections.abc import Callable
from math import inf

import pytest
import torch
from torch import Tensor

from darknight import kernels
from darknight.kernels import (
    Rounding,
    Weighing,
    compiled_depthwise,
    compiled_few_rows,
    compiled_field,
    compiled_layers,
    compiled_real,
    residues,
    threads,
)
from darknight.kernels.compiled_layers import Affine, Window
from kernels import test_residues
from kernels.test_field import drawn_matrix, placed, systematic
from kernels.test_field import residues as drawn_residues
from kernels.test_real import SCHEMES, operands

PRIME = 2**28 - 57
PRIMES = (PRIME, 2**28 - 89)
COUNTS = (2, 3, 7)
AS_INSTALLED = threads._EACH
Run = Callable[[], object]  # fresh results of the same operands


@pytest.fixture
def several(monkeypatch):
    """Any operand is worth a thread, and a part waits until another thread has one too: [how often that was so]."""
    if compiled_field.chosen() is None:
        pytest.skip("nothing was compiled")
    before, split, passes = torch.get_num_threads(), threads.split, []

    def meeting(does, length, numbers, step=1):
        here, two = set(), threading.Event()

        def part(first, last):
            if last - first < length:
                here.add(threading.get_ident())
                if len(here) > 1:
                    two.set()
                assert two.wait(60), "one thread did several parts while the others slept"
            return does(first, last)

        found = split(part, length, numbers, step)
        if len(found) > 1:
            passes.append(len(found))
        return found

    monkeypatch.setattr(threads, "_EACH", 1)
    monkeypatch.setattr(threads, "split", meeting)
    yield passes
    torch.set_num_threads(before)


def flat(found: object) -> list[bytes]:
    """The bits of all numbers in it."""
    if found is None or isinstance(found, bool | int | float):
        return [repr(found).encode()]
    if isinstance(found, Tensor):
        return [found.detach().contiguous().numpy().tobytes()]
    if isinstance(found, list | tuple):
        return [each for one in found for each in flat(one)]
    return [each for one in vars(found).values() for each in flat(one)]


def same_bits(run: Run, passes: list[int]) -> int:
    """Asserts it; how many passes were on several threads."""
    torch.set_num_threads(1)
    alone, before = flat(run()), len(passes)
    assert len(passes) == before, "one thread was asked for"
    for count in COUNTS:
        torch.set_num_threads(count)
        together = flat(run())
        assert together == alone, f"{count} threads give other bits than one"
    return len(passes) - before


# --- what is called, by name ------------------------------------------------------------------------------------------
def combinations(draw: random.Random) -> Run:
    groups, length = draw.choice([(1, 5000), (2, 3001), (5, 1100), (9, 7), (3, 2049)])
    rows = draw.randint(1, 4)
    matrix = drawn_matrix(draw, rows, 5, PRIME)
    sources = [placed(draw, drawn_residues((groups, length), PRIME)) for _ in range(5)]
    outs = placed(draw, torch.empty(rows, groups, length, dtype=torch.int32))
    return lambda: kernels.combine(matrix, sources, PRIME, out=outs.fill_(-7), centred=True).clone()


def unmasking(draw: random.Random) -> Run:
    shape = draw.choice([(1, 5000), (3, 1023), (6, 65)])
    matrix = [[1, 0, -1], [0, 1, -1]]
    sources = [placed(draw, drawn_residues(shape, PRIME)) for _ in range(3)]
    sources[1][-1, -1] = PRIME  # which is no residue
    out, floats = torch.empty(2, *shape, dtype=torch.int32), torch.empty(2, *shape)

    def run() -> object:
        outside = kernels.unmask(matrix, sources, PRIME, 9, out=out.fill_(-7), floats=floats.fill_(-7))
        assert outside == [1]
        return outside, out.clone(), floats.clone()

    return run


def encoding(draw: random.Random, noises: int = 1) -> Run:
    inputs, examples, length = draw.randint(1, 4), draw.randint(5, 17), draw.choice([1, 7, 784, 1025, 2500])
    groups = -(-examples // inputs)
    matrix = systematic(inputs) if noises == 1 else drawn_matrix(draw, 5, inputs + noises, PRIME)
    values = torch.randn(examples, length).clamp_(-4, 3.99)
    rounding = Rounding(draw.getrandbits(32), draw.getrandbits(32), draw.randrange(50)) if draw.random() < 0.5 else None
    noise, keep = drawn_residues((noises, groups, length), PRIME), draw.random() < 0.5
    outs = [torch.empty(groups, length, dtype=torch.int32) if each else None for each in range(len(matrix))]

    def run() -> object:
        for out in outs[1:]:
            out.fill_(-7)
        found = kernels.encode(
            values, 8, rounding, matrix, noise, PRIME, inputs=inputs, largest=1024, outs=outs, keep=keep, row=3
        )
        assert (found.checksum is None) == (rounding is not None)
        return found, [out.clone() for out in outs[1:]]

    return run


def fixed_point(draw: random.Random) -> Run:
    values = placed(draw, torch.randn(3, draw.choice([7, 1024, 2051])))
    dense = values.contiguous()
    words = torch.randint(-(2**31), 2**31, dense.shape, dtype=torch.int32)
    quantised, other = kernels.quantise_nearest(dense, 9), kernels.quantise_nearest(dense, 9)
    other[-1, -1] += 1
    return lambda: (
        kernels.largest_magnitude(values),
        kernels.largest_magnitude(torch.where(dense == dense[2, 5], inf, dense)),
        kernels.quantise_nearest(values, 9),
        kernels.quantise_stochastic(dense, 9, words),
        kernels.unchanged(dense, 9, quantised),
        kernels.unchanged(dense, 9, other),
    )


def words(draw: random.Random) -> Run:
    drawn = torch.randint(-(2**31), 2**31, (draw.choice([1, 5000, 40_001]),), dtype=torch.int32)
    last = draw.choice([2**28 - 58, 2**28 - 2**20, 2**27])  # the last one: more places than are written down

    def run() -> object:
        cut = drawn.clone()
        return kernels.cut_words(cut, 2**28 - 1, last), cut, kernels.rounding_words(len(drawn), Rounding(last, 7))

    return run


def sums(draw: random.Random) -> Run:
    values = torch.randint(-1024, 1025, draw.choice([(5, 3, 1300), (7, 2100, 1), (3, 17, 16)]), dtype=torch.int32)
    floats, long = values / 256.0, torch.randint(-1024, 1025, (5, (1 << 14) + 77), dtype=torch.int32)
    return lambda: (
        kernels.moments(values, 0),
        kernels.moments(floats, 8),
        kernels.survey(floats, 8),
        kernels.checksum(values),
        kernels.checksum(long),
        kernels.checksum(long / 256.0, 8),
    )


def unmasking_weighed(draw: random.Random) -> Run:
    inputs, lines, channels = draw.randint(1, 4), draw.choice([1, 1, 3]), draw.choice([1, 5, 17, 64])
    positions, examples = draw.choice([1, 9, 49, 257, 1024]), draw.randint(inputs + 1, 5 * inputs)
    groups = -(-examples // inputs)
    matrix = [[int(i == j) for i in range(inputs)] + [-1] for j in range(inputs)]
    sources = [placed(draw, drawn_residues((groups, lines, channels, positions), PRIME)) for _ in range(inputs + 1)]
    sources[-1][-1, -1, -1, -1] = -1  # which is no residue
    how = Weighing(
        channels=test_residues.entries(draw, (2, channels), 22),
        rows=test_residues.entries(draw, (2, examples * lines), 23),
        positions=positions,
        primes=PRIMES,
        longest=test_residues.at_once(PRIMES, 22),
        often=draw.choice([1, test_residues.at_once(PRIMES, 23)]),
    )
    bias, limits = draw.choice([None, torch.randn(channels)]), draw.choice([None, (0.0, 6.0)])
    scaling = draw.choice([None, Affine(torch.randn(channels), torch.randn(channels))])
    floats = torch.empty(examples, lines, channels, positions)

    def run() -> object:
        given = {"floats": floats.fill_(-7), "weighing": how, "bias": bias, "limits": limits, "scaling": scaling}
        outside, sums = kernels.unmask_weighed(matrix, sources, PRIME, 9, **given)
        assert outside == [inputs]
        return outside, sums, floats.clone()

    return run


def weighed(draw: random.Random) -> Run:
    outer, length, columns = draw.choice(
        [(8, 33, 1), (9, 34, 3), (1, 66, 100), (3, 70, 1025), (10, 64, 49), (2, 65, 16)]
    )
    values = torch.randint(-(2**27), 2**27, (outer, length, columns), dtype=torch.int32)
    vectors, rows = test_residues.entries(draw, (2, length), 22), test_residues.entries(draw, (2, outer), 23)
    longest, often = test_residues.at_once(PRIMES, 22), test_residues.at_once(PRIMES, 23)
    grouped = test_residues.entries(draw, (2, length * outer), 22)
    return lambda: (
        residues.weigh(values, vectors, PRIMES, longest=longest),
        residues.weigh(values, grouped, PRIMES, longest=longest, period=1),
        residues.weigh(values / 2**12, vectors, PRIMES, longest=longest, exponent=3),
        residues.weigh_rows(values, vectors, rows, PRIMES, longest=longest, often=often),
    )


def projected(draw: random.Random) -> Run:
    rows, channels, height, width = draw.choice([(3, 5, 7, 9), (9, 2, 40, 33), (5, 17, 1, 3)])
    values = torch.randint(-(2**27), 2**27, (rows, channels, height, width), dtype=torch.int32)
    vectors = test_residues.entries(draw, (2, rows), 22)
    down, across = (test_residues.entries(draw, (2, 3, size), 20) for size in (height, width))
    longest, often = test_residues.at_once(PRIMES, 22), test_residues.at_once(PRIMES, 20)
    given = {"longest": longest, "often": often}
    return lambda: (
        residues.project(values, vectors, down, across, PRIMES, **given),
        residues.project(values / 2**12, vectors, down, across, PRIMES, **given, exponent=3),
    )


def normalised(draw: random.Random) -> Run:
    library, shape = compiled_layers.chosen(), draw.choice([(5, 3), (3, 20, 7, 7), (2, 17, 33, 37), (4, 2, 1025)])
    x, grad = placed(draw, torch.randn(shape)).contiguous(), torch.randn(shape)
    weight, bias, limits = torch.randn(shape[1]), torch.randn(shape[1]), draw.choice([None, (0.0, 6.0)])

    def run() -> object:
        running = torch.ones(shape[1]), torch.ones(shape[1])
        y, by = compiled_layers.normalise(library, x, weight, bias, running, 0.3, 1e-5, limits)
        return (
            y,
            running,
            compiled_layers.derive(library, x, grad, by, limits),
            compiled_layers.affine(library, x, by.scale, by.shift, limits),
        )

    return run


def finished(draw: random.Random) -> Run:
    library, shape = compiled_layers.chosen(), draw.choice([(5, 3), (3, 20, 7, 7), (2, 17, 33, 37), (9, 700)])
    y, grad, bias = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    scaling = draw.choice([None, Affine(torch.randn(shape[1]), torch.randn(shape[1]))])

    def run() -> object:
        done = y.clone()
        assert compiled_layers.finish(library, done, 1, bias, (0.0, 6.0), scaling)
        back = compiled_layers.come_back(library, grad, 1, done, (0.0, 6.0))
        return done, back, compiled_layers.come_back(library, grad, 1)

    return run


def pooled(draw: random.Random) -> Run:
    library, window = compiled_layers.chosen(), Window((3, 3), (2, 2), (1, 1))
    x = torch.randn(draw.randint(2, 4), 5, 9, draw.randint(3, 40))

    def run() -> object:
        y, taps = compiled_layers.pool(library, x, window, keep=True)
        back = compiled_layers.unpool(library, y, taps, x.shape, window)
        return y, taps, back, compiled_layers.pool(library, x, window, keep=False)

    return run


def depthwise(draw: random.Random) -> Run:
    library, step = compiled_depthwise.chosen(), draw.choice([1, 2])
    size = draw.choice([(7, 7), (14, 9), (33, 112), (5, 700)])
    examples, channels, kernel = draw.randint(2, 9), draw.randint(2, 9), draw.choice([3, 5])
    window = Window((kernel, kernel), (step, step), (kernel // 2, 1))
    x, weight = torch.randn(examples, channels, *size), torch.randn(channels, 1, kernel, kernel)
    grad, bias = torch.randn(examples, channels, *window.outputs(*size)), torch.randn(channels)
    scaling = Affine(torch.randn(channels), torch.randn(channels))
    return lambda: (
        compiled_depthwise.convolve(library, x, weight, bias, window),
        compiled_depthwise.convolve(library, x, weight, bias, window, scaling, (0.0, 6.0)),
        compiled_depthwise.convolve_back(library, x, weight, grad, window, (True, True, True)),
        compiled_depthwise.convolve_back(library, x, weight, grad, window, (False, True, False)),
        compiled_depthwise.convolve_back(library, x, weight, grad, window, (True, False, False)),
    )


def few_rows(draw: random.Random) -> Run:
    library, rows = compiled_few_rows.chosen(), draw.randint(1, 32)
    inputs, outputs = draw.choice([(65, 97), (700, 50), (4200, 145), (1088, 1000)])
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    grad, bias = torch.randn(rows, outputs), torch.randn(outputs)
    return lambda: (
        compiled_few_rows.multiply(library, x, weight, bias),
        compiled_few_rows.multiply_back(library, x, weight, grad, (True, True, True)),
    )


def real(draw: random.Random) -> Run:
    library, name = compiled_real.chosen(), draw.choice(sorted(SCHEMES))
    wide = draw.choice([torch.float32, torch.float64])
    values, rest = operands(name, 1, draw.randint(3, 9), draw.choice([7, 1025, 2600]), wide)
    shape = (len(rest["data"]), *rest["noise"].shape[1:])
    count = draw.choice([1, 2049, 4000])
    drawn, uniforms = (torch.randint(-(2**63), 2**63 - 1, (count + count % 2,)) for _ in range(2))
    planes = values[:3].unflatten(1, (-1, 1)).expand(-1, -1, 9).contiguous()
    vectors = torch.randn(3, planes.shape[1], dtype=torch.float64)

    def run() -> object:
        outs = torch.full(shape, -7.0, dtype=wide)
        found = compiled_real.encode(library, values, **rest, outs=outs)
        sources = list(outs.unbind(0))
        folded = compiled_real.fold(library, planes, vectors, 1)
        return (
            found,
            outs,
            compiled_real.encode(library, values, **{**rest, "bound": 0.01}, outs=torch.empty_like(outs))[1],
            compiled_real.decode(library, [[0.5] * len(sources)], sources, examples=1, dtype=wide),
            compiled_real.decode(library, [[0.5] * len(sources)] * 2, sources, examples=3, dtype=torch.float32)
            if shape[1] > 1
            else None,
            compiled_real.within(library, [1.0] * len(sources), sources, 1e9),
            compiled_real.within(library, [1.0] * len(sources), sources, 1e-9),
            compiled_real.sizes(library, planes),
            compiled_real.gaussian(
                library, drawn, uniforms[:count], 900.5, 3, -5, out=torch.empty(count, dtype=torch.int64)
            ),
            folded,
            compiled_real.meet(library, planes, folded, 1),
        )

    return run


def weights(draw: random.Random) -> Run:
    values = torch.randn(draw.choice([(130, 17), (257, 3, 3, 3), (2, 1025), (4, 2, 7, 11)])).clamp_(-3.9, 3.9)
    earlier = draw.choice([None, torch.randint(-1024, 1024, values.shape, dtype=torch.int32)])
    beyond = values.clone()
    beyond[-1, -1] = 4.0
    return lambda: (
        kernels.requantise(values, 9, 11, counted=True, earlier=earlier),
        kernels.requantise(values, 9, 11, counted=False, earlier=earlier),
        kernels.requantise(beyond, 9, 11, counted=True, earlier=earlier),
    )


def large() -> dict[str, Run]:
    """Of the same form as in a layer of an ordinary network, at K=4 and M=1."""
    examples, inputs, channels, size = 8, 4, 32, (47, 49)
    torch.manual_seed(7)
    layers, convolutions = compiled_layers.chosen(), compiled_depthwise.chosen()
    x, groups, positions = torch.randn(examples, channels, *size), examples // inputs, size[0] * size[1]
    ones, weight, window = torch.ones(channels), torch.randn(channels, 1, 3, 3), Window((3, 3), (1, 1), (1, 1))
    few, wide = torch.randn(examples, 1040), torch.randn(1040, 1040)
    noise = drawn_residues((1, groups, *x.shape[1:]), PRIME)
    answers = [drawn_residues((groups, channels, positions), PRIME) for _ in range(inputs + 1)]
    decoding, floats = [[int(i == j) for i in range(inputs)] + [-1] for j in range(inputs)], torch.empty_like(x)
    integers = torch.randint(-1000, 1000, (examples, channels, positions), dtype=torch.int32)
    u, v = (torch.randint(-(1 << 20), 1 << 20, (2, n)).to(torch.float64) for n in (channels, examples))
    how = Weighing(channels=u, rows=v, positions=positions, primes=PRIMES, longest=16, often=16)

    def encoded() -> object:
        outs = [torch.empty(noise.shape[1:], dtype=torch.int32) for _ in range(inputs + 2)]
        given = {"inputs": inputs, "largest": 1 << 13, "outs": outs}
        return kernels.encode(x, 8, None, systematic(inputs), noise, PRIME, **given), outs

    def unmasked() -> object:
        given = {"floats": floats.view(examples, channels, positions), "weighing": how}
        return kernels.unmask_weighed(decoding, answers, PRIME, 9, **given), floats.clone()

    def normal() -> object:
        y, by = compiled_layers.normalise(layers, x, ones, ones, None, 0.1, 1e-5, (0.0, 6.0))
        return y, compiled_layers.derive(layers, x, y, by, (0.0, 6.0)), compiled_layers.come_back(layers, y, 1)

    return {
        "encode": encoded,
        "unmask": unmasked,
        "weigh": lambda: residues.weigh(integers, u, PRIMES, longest=16),
        "project": lambda: residues.project(
            integers.view_as(x),
            v,
            torch.ones(2, 3, 47).double(),
            torch.ones(2, 3, 49).double(),
            PRIMES,
            longest=16,
            often=16,
        ),
        "largest": lambda: kernels.largest_magnitude(x),
        "batch norm": normal,
        "pool": lambda: compiled_layers.pool(layers, x, window, keep=True),
        "depthwise": lambda: compiled_depthwise.convolve_back(convolutions, x, weight, x, window, (True, True, True)),
        "few rows": lambda: compiled_few_rows.multiply_back(
            compiled_few_rows.chosen(), few, wide, few, (True, True, True)
        ),
        "new weights": lambda: kernels.requantise(x / 4, 8, 12, counted=True, earlier=None),
    }


KERNELS = [combinations, unmasking, encoding, fixed_point, words, sums, unmasking_weighed, weighed, projected]
KERNELS += [normalised, finished, pooled, depthwise, few_rows, real, weights]
LARGE = [
    "encode",
    "unmask",
    "weigh",
    "project",
    "largest",
    "batch norm",
    "pool",
    "depthwise",
    "few rows",
    "new weights",
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_results_do_not_depend_on_the_number_of_threads(several, kernel, full):
    draw, passes = random.Random(kernel.__name__), 0
    torch.manual_seed(5)
    for _ in range(60 if full else 12):
        passes += same_bits(kernel(draw), several)
    assert passes >= len(COUNTS), "it never used several threads"


@pytest.mark.parametrize("name", LARGE)
def test_large_operands_use_several_threads_without_being_told(several, monkeypatch, name):
    monkeypatch.setattr(threads, "_EACH", AS_INSTALLED)
    assert same_bits(large()[name], several) >= len(COUNTS)


def test_noise_of_two_rows_is_masked_with_the_same_bits(several):
    draw = random.Random(2)
    for _ in range(5):
        same_bits(encoding(draw, noises=2), several)


def test_a_float_that_is_summed_in_parts_is_noticed(several):
    """So the tests above can fail."""
    values = torch.randn(10_007)
    with pytest.raises(AssertionError, match="other bits"):
        same_bits(lambda: sum(threads.split(lambda a, b: values[a:b].cumsum(0)[-1], 10_007, 10_007)), several)
    assert same_bits(lambda: max(threads.split(lambda a, b: float(values[a:b].max()), 10_007, 10_007)), several) == 3
