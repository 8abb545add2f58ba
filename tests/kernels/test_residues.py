"""Weighed sums modulo primes: library, reference and exact integers agree to the last bit, and nothing else is read."""

import logging
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from darknight.errors import UsageError
from darknight.kernels import compiled, compiled_residues, reference, reference_residues, residues
from darknight.kernels.compiled_residues import Library
from darknight.randomness import Randomness
from kernels.guarded import PRELUDE
from kernels.layout import fields_in, fields_of

MODULI = [(2**28 - 57, 2**28 - 89), (2**25 - 39,), (2**25 - 39, 2**25 - 49), (1_048_573,)]


def usable(kind: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return kind != "avx2_" or (" avx2 " in flags and " fma " in flags)


@pytest.fixture(scope="module", params=["", "avx2_", "plain_"], ids=["chosen", "avx2", "plain"])
def library(request) -> Library:
    """The library as this processor runs it best, as one with AVX2 does, and as any would."""
    if shutil.which("cc") is None or not usable(request.param):
        pytest.skip("no C compiler, or another processor")
    found = Library.loaded(request.param)
    assert found is not None, "residues.c was not built from these sources: install the package again"
    return found


# --- exact integers, by the definition --------------------------------------------------------------------------------
def canonical(values: Tensor, primes: tuple[int, ...]) -> Tensor:
    """int64 (modulus or 1, ...) -> residues next to zero."""
    moduli = torch.tensor(primes).view(-1, *(1,) * (values.dim() - 1))
    half = moduli // 2
    return ((values + half).remainder(moduli) - half).to(torch.int32)


def exact_weigh(values: Tensor, vectors: Tensor, primes: tuple[int, ...], groups: int, period: int) -> Tensor:
    outer, rows, columns = values.shape
    apart, length = (outer // period if period else 1), rows // groups
    weights = vectors.to(torch.int64).reshape(len(vectors), apart, 1, groups, length)
    weights = weights.permute(1, 2, 3, 0, 4).unsqueeze(-1)  # (apart, 1, group, rep, row, 1)
    whole = values.to(torch.int64).reshape(apart, period, groups, 1, length, columns)
    products = torch.stack([(whole * weights).remainder(prime) for prime in primes])
    return canonical(products.sum(-2).reshape(len(primes), outer, groups, len(vectors), columns), primes)


def exact_fold(values: Tensor, matrix: Tensor, primes: tuple[int, ...]) -> Tensor:
    products = values.to(torch.int64).unsqueeze(3) * matrix.to(torch.int64)[:, None, :, :, None]
    moduli = torch.tensor(primes).view(-1, *(1,) * 5)
    return canonical(products.remainder(moduli).sum(4), primes)


def exact_slide(values: Tensor, weights: Tensor, primes: tuple[int, ...], step, hole, skipped, count) -> Tensor:
    total = torch.zeros(*values.shape[:4], count, values.shape[5], dtype=torch.int64)
    moduli = torch.tensor(primes).view(-1, *(1,) * 4)
    for p in range(count):
        for tap in range(weights.shape[1]):
            at = p * step + tap * hole - skipped
            if 0 <= at < values.shape[4]:
                product = values[..., at, :].to(torch.int64) * weights[:, tap].to(torch.int64).view(-1, 1, 1)
                total[..., p, :] += product.remainder(moduli)
    return canonical(total, primes)


# --- operands ---------------------------------------------------------------------------------------------------------
def laid_out(generator: random.Random, shape: tuple[int, int, int]) -> Tensor:
    """int32 of this shape in memory as callers have it: whole, cut out of more, transposed, repeated, at odd places."""
    outer, rows, columns = shape
    kind = generator.choice(["whole", "cut", "turned", "odd", "repeated", "strided"])
    if kind == "cut":
        return torch.empty(outer + 1, rows + 2, columns + 3, dtype=torch.int32)[1:, 1:-1, 2:-1]
    if kind == "turned":
        return torch.empty(rows, outer, columns, dtype=torch.int32).transpose(0, 1)
    if kind == "odd":
        start = generator.randint(1, 7)
        return torch.empty(outer * rows * columns + start, dtype=torch.int32)[start:].view(shape)
    if kind == "repeated":
        return torch.empty(1, rows, columns, dtype=torch.int32).expand(shape)
    if kind == "strided":  # the last axis has gaps
        return torch.empty(outer, columns, rows, dtype=torch.int32).transpose(1, 2)
    return torch.empty(shape, dtype=torch.int32)


def fill(generator: random.Random, values: Tensor, half: int) -> None:
    """Numbers up to half the prime; sometimes all at the edge, of one sign or of either."""
    base = values[:1] if values.stride(0) == 0 and len(values) > 1 else values
    if generator.random() < 0.3:
        base.fill_(-half)
        if generator.random() < 0.5:
            base[..., ::2] = half
    elif base.numel():
        base.copy_(torch.randint(-half, half + 1, tuple(base.shape), dtype=torch.int32))


def entries(generator: random.Random, shape: tuple[int, ...], bits: int) -> Tensor:
    if generator.random() < 0.3:
        return torch.full(shape, -(2.0 ** (bits - 1)), dtype=torch.float64)
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape).to(torch.float64)


def at_once(primes: tuple[int, ...], bits: int) -> int:
    half = max(primes) // 2 + 8
    return int((2**53 * (1 - 2.0**-23) - half) // (half * 2 ** (bits - 1)))


def both(found: Tensor | None, expected: Tensor, exact: Tensor, label: object) -> None:
    assert found is not None, label
    assert found.shape == expected.shape == exact.shape, label
    assert torch.equal(expected, exact), label
    assert torch.equal(found, exact), label


def try_weigh(library: Library, generator: random.Random) -> None:
    primes, bits = generator.choice(MODULI), generator.choice([20, 22, 24])
    groups, length = generator.choice([1, 1, 1, 2, 3]), generator.choice([0, 1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 131])
    columns = generator.choice([0, 1, 1, 2, 3, 7, 8, 9, 9, 10, 15, 49, 63, 196, 1023, 1024, 1025, 2100])
    outer, reps = generator.choice([0, 1, 1, 2, 6]), generator.randint(1, 5)
    period = generator.choice([1, 2, 3]) if outer == 6 else outer
    longest = generator.choice([1, 3, at_once(primes, bits)])
    longest = min(longest, at_once(primes, bits))
    values = laid_out(generator, (outer, groups * length, columns))
    fill(generator, values, max(primes) // 2)
    vectors = entries(generator, (reps, (outer // period if outer else 1) * groups * length), bits)
    before = values.clone()
    options = {"longest": longest, "groups": groups, "period": period}
    both(
        compiled_residues.weigh(library, values, vectors, primes, **options),
        reference_residues.weigh(values, vectors, primes, **options),
        exact_weigh(values, vectors, primes, groups, period),
        (tuple(values.shape), values.stride(), reps, options, primes),
    )
    assert torch.equal(values, before)
    exponent = generator.choice([-3, 0, 7])
    floats = torch.empty_like(values, dtype=torch.float32).copy_(values).mul_(2.0**-exponent * 1.0001)
    floats[floats.abs() * 2.0**exponent > max(primes) // 2] = 0.5 * 2.0**-exponent  # a tie
    both(
        compiled_residues.weigh(library, floats, vectors, primes, exponent=exponent, **options),
        residues.weigh(floats.double().mul(2.0**exponent).round().int(), vectors, primes, **options),
        exact_weigh(reference.quantise_nearest(floats, exponent), vectors, primes, groups, period),
        (tuple(values.shape), values.stride(), reps, options, primes, exponent),
    )


def try_weigh_rows(library: Library, generator: random.Random) -> None:
    primes, bits = generator.choice(MODULI), generator.choice([20, 22])
    outer, length = generator.choice([0, 1, 2, 15, 16, 17, 40]), generator.choice([0, 1, 3, 4, 33, 64])
    columns, reps = generator.choice([1, 2, 9, 49, 1025]), generator.randint(1, 4)
    values = laid_out(generator, (outer, length, columns))
    fill(generator, values, max(primes) // 2)
    vectors, rows = entries(generator, (reps, length), bits), entries(generator, (reps, outer), bits + 1)
    options = {"longest": at_once(primes, bits), "often": generator.choice([1, at_once(primes, bits + 1)])}
    inner = exact_weigh(values, vectors, primes, 1, outer).squeeze(2).transpose(1, 2).unsqueeze(2)
    both(
        compiled_residues.weigh(library, values, vectors, primes, groups=1, period=outer, rows=rows, **options),
        reference_residues.weigh_rows(values, vectors, rows, primes, **options),
        exact_fold(inner, rows.unsqueeze(1), primes).flatten(2),
        (tuple(values.shape), reps, options, primes),
    )


def try_fold(library: Library, generator: random.Random) -> None:
    primes, bits = generator.choice(MODULI), generator.choice([2, 22, 24])
    sizes = (len(primes), generator.randint(1, 3), generator.choice([0, 1, 5]))
    n, inner = generator.choice([1, 2, 7, 8, 9, 17, 56, 130]), generator.choice([0, 1, 1, 2, 7, 8, 9, 14, 16, 17, 1030])
    values = torch.empty(*sizes, n, inner, dtype=torch.int32)
    fill(generator, values, min(primes) // 2)
    matrix = entries(generator, (sizes[1], generator.choice([1, 3]), n), bits)
    if generator.random() < 0.5:
        matrix[..., ::3] = 0.0
    often = generator.choice([1, min(1000, at_once(primes, bits))])
    both(
        compiled_residues.fold(library, values, matrix, primes, often),
        reference_residues.fold(values, matrix, primes, often=often),
        exact_fold(values, matrix, primes),
        (tuple(values.shape), tuple(matrix.shape), often, primes),
    )


def try_slide(library: Library, generator: random.Random) -> None:
    primes, bits = generator.choice(MODULI), generator.choice([2, 24])
    sizes = (len(primes), generator.choice([0, 1, 3]), generator.randint(1, 4), generator.randint(1, 3))
    size, inner = generator.choice([1, 5, 14, 60]), generator.choice([1, 1, 2, 9, 1030])
    step, hole, skipped = generator.randint(1, 3), generator.randint(1, 3), generator.randint(0, 4)
    values = torch.empty(*sizes, size, inner, dtype=torch.int32)
    fill(generator, values, min(primes) // 2)
    weights = entries(generator, (sizes[2], generator.choice([1, 2, 3, 7, 20])), bits)
    reach = size + 2 * skipped - hole * (weights.shape[1] - 1)
    # Also more positions than there are: beyond the end is nothing.
    options = {"step": step, "hole": hole, "skipped": skipped, "count": max(1, (reach - 1) // step + 3)}
    often = generator.choice([1, min(1000, at_once(primes, bits))])
    both(
        compiled_residues.slide(library, values, weights, primes, often=often, **options),
        reference_residues.slide(values, weights, primes, often=often, **options),
        exact_slide(values, weights, primes, **options),
        (tuple(values.shape), tuple(weights.shape), options, primes),
    )


def try_dot(library: Library, generator: random.Random) -> None:
    primes = generator.choice(MODULI)
    n = generator.choice([0, 1, 7, 255, 256, 257, 600])
    shape = (len(primes), generator.choice([0, 1, 3]), generator.randint(1, 3), n)
    left, right = torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.int32)
    for each in (left, right):
        fill(generator, each, min(primes) // 2)
    products = (left.to(torch.int64) * right).remainder(torch.tensor(primes).view(-1, 1, 1, 1))
    both(
        compiled_residues.dot(library, left, right, primes),
        reference_residues.dot(left, right, primes),
        canonical(products.sum((1, 3)), primes),
        (shape, primes),
    )


def try_project(library: Library, generator: random.Random) -> None:
    primes, bits = generator.choice(MODULI), generator.choice([20, 24])
    height, width = generator.choice([(1, 1), (3, 5), (7, 7), (14, 14), (33, 30), (9, 130), (40, 31), (2, 1024)])
    rows, channels, reps = generator.choice([1, 2, 8, 17, 40]), generator.choice([1, 3, 6, 25]), generator.randint(1, 3)
    tall, wide = generator.choice([1, 2, 3, 8]), generator.choice([1, 3, 11])
    memory = torch.zeros(rows, channels * height * width + generator.choice([0, 5]), dtype=torch.int32)
    fill(generator, memory, max(primes) // 2)
    values = memory[:, : channels * height * width].view(rows, channels, height, width)
    v = entries(generator, (reps, rows), 23)
    down, across = entries(generator, (reps, tall, height), bits), entries(generator, (reps, wide, width), bits)
    down[down % 3 == 0] = 0.0  # positions that a tap does not meet
    options = {"longest": at_once(primes, 23), "often": generator.choice([1, at_once(primes, bits)])}
    whole = exact_weigh(values.reshape(1, rows, -1), v, primes, 1, 1).view(len(primes), reps, channels, height, width)
    along = exact_fold(whole, down, primes)
    exact = exact_fold(along.reshape(len(primes), reps, channels * tall, width, 1), across, primes)
    expected = exact.view(len(primes), reps, channels, tall, wide)
    label = (tuple(values.shape), reps, tall, wide, options, primes)
    found = compiled_residues.project(library, values, v, down, across, primes, exponent=None, **options)
    both(found, expected, expected, label)
    floats = values.remainder(4001).sub(2000).to(torch.float32).add(0.25) * 0.125
    integers = reference.quantise_nearest(floats, 3)
    both(
        compiled_residues.project(library, floats, v, down, across, primes, exponent=3, **options),
        compiled_residues.project(library, integers, v, down, across, primes, exponent=None, **options),
        residues.project(integers, v, down, across, primes, **options),
        label,
    )


TRIES: list[Callable[[Library, random.Random], None]] = [
    try_weigh,
    try_weigh_rows,
    try_fold,
    try_slide,
    try_dot,
    try_project,
]


def try_everything(library: Library, seeds: int = 40) -> None:
    for attempt in TRIES:
        for seed in range(seeds):
            torch.manual_seed(seed)
            attempt(library, random.Random(seed))


@pytest.mark.parametrize("attempt", TRIES, ids=lambda attempt: attempt.__name__)
def test_library_reference_and_exact_integers_agree_on_every_shape(library, attempt, full: bool):
    for seed in range(2000 if full else 150):
        torch.manual_seed(seed)
        attempt(library, random.Random(seed))


def test_a_batch_at_full_size(library):
    primes = MODULI[0]
    values = torch.randint(-(2**27) + 29, 2**27 - 29, (4, 96, 56 * 56), dtype=torch.int32)
    vectors, rows = (torch.randint(-(2**21), 2**21, (2, size)).to(torch.float64) for size in (96, 4))
    found = compiled_residues.weigh(
        library, values, vectors, primes, longest=32, groups=1, period=4, rows=rows, often=16
    )
    assert torch.equal(found, reference_residues.weigh_rows(values, vectors, rows, primes, longest=32, often=16))


def next_to_zero(value: int, prime: int) -> int:
    return (value + prime // 2) % prime - prime // 2


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("length", [1, 31, 32, 7936, 7937])
def test_the_largest_weighed_sums_are_exact(library, length, rounded, sign):
    """Every number and every weight as large as it can be; more rows than one way of summing holds."""
    primes, columns = MODULI[0], 67
    number = sign * (primes[0] // 2) // 2**8 * 2**8  # a float32
    values = torch.full((1, length, columns), number, dtype=torch.int32)
    vectors = torch.full((2, length), -(2.0**21), dtype=torch.float64)
    floats, exponent = (values.to(torch.float32) / 2, 1) if rounded else (values, None)
    found = compiled_residues.weigh(
        library, floats, vectors, primes, longest=at_once(primes, 22), groups=1, period=1, exponent=exponent
    )
    assert found is not None
    for modulus, prime in enumerate(primes):
        assert found[modulus].eq(next_to_zero(length * number * -(2**21), prime)).all()


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("primes", MODULI)
@pytest.mark.parametrize(
    ("outer", "length"), [(1, 1), (3, 15), (4, 16), (5, 17), (9, 8192), (2, 8193), (1023, 33), (1029, 4)]
)
def test_rows_of_a_matrix_are_weighed_together_and_exactly(library, outer, length, primes, largest):
    """Each sum over inputs: rows share their weights; vectors and their tails, tiles, and more than one way holds."""
    generator = random.Random(outer * length)
    values = torch.empty(outer, length, 1, dtype=torch.int32)
    if largest:
        values.fill_(max(primes) // 2)
    else:
        fill(generator, values, max(primes) // 2)
    for reps in (1, 2, 3, 4):
        vectors = (
            torch.full((reps, length), -(2.0**21), dtype=torch.float64)
            if largest
            else entries(generator, (reps, length), 22)
        )
        options = {"longest": at_once(primes, 22), "groups": 1, "period": outer}
        found = compiled_residues.weigh(library, values, vectors, primes, **options)
        expected = reference_residues.weigh(values, vectors, primes, **options)
        both(found, expected, exact_weigh(values, vectors, primes, 1, outer), (outer, length, reps))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("rows", "height"), [(8, 14), (60, 440), (61, 3), (3, 447), (3, 448), (2, 513)])
def test_the_largest_projections_are_exact(library, rows, height, rounded, sign):
    primes, width = MODULI[0], 9
    number = sign * (primes[0] // 2) // 2**8 * 2**8
    values = torch.full((rows, 2, height, width), number, dtype=torch.int32)
    vectors = torch.full((2, rows), -(2.0**22), dtype=torch.float64)
    down, across = (torch.full((2, 3, size), -(2.0**23), dtype=torch.float64) for size in (height, width))
    floats, exponent = (values.to(torch.float32) / 2, 1) if rounded else (values, None)
    longest, often = at_once(primes, 23), at_once(primes, 24)
    found = compiled_residues.project(
        library, floats, vectors, down, across, primes, longest=longest, often=often, exponent=exponent
    )
    assert found is not None
    whole = rows * height * width * number * -(2**22) * 2**46
    for modulus, prime in enumerate(primes):
        assert found[modulus].eq(next_to_zero(whole, prime)).all()


def test_threads_do_not_disturb_each_other(library):
    values = [torch.randint(-(2**20), 2**20, (3, 40, 700 + i), dtype=torch.int32) for i in range(8)]
    vectors = torch.randint(-(2**20), 2**20, (2, 40)).to(torch.float64)
    options = {"longest": 32, "groups": 1, "period": 3}
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda each: compiled_residues.weigh(library, each, vectors, MODULI[0], **options), values * 5)
        )
    for each, sums in zip(values * 5, found, strict=True):
        assert torch.equal(sums, reference_residues.weigh(each, vectors, MODULI[0], **options))


# --- wrong operands ---------------------------------------------------------------------------------------------------
X, V, Y = torch.zeros(2, 4, 3, dtype=torch.int32), torch.zeros(2, 4).double(), torch.zeros(1, 2, 1, 3, 5).int()
Z, ONE = torch.zeros(1, 2, 3, 1, 5, 4, dtype=torch.int32), (2**25 - 39,)
SLIDE = {"step": 1, "hole": 1, "skipped": 0, "count": 3, "often": 4}


def project(**changed: Tensor) -> Tensor | None:
    given = {"v": torch.zeros(2, 3), "down": torch.zeros(2, 3, 5), "across": torch.zeros(2, 3, 4)}
    v, down, across = ({**given, **changed}[name].double() for name in given)
    return residues.project(torch.zeros(3, 2, 5, 4).int(), v, down, across, ONE, longest=4, often=4)


WRONG: dict[str, Callable[[], Tensor | None]] = {
    "vectors too short": lambda: residues.weigh(X, V[:, :3], ONE, longest=4),
    "vectors too long": lambda: residues.weigh(X, torch.zeros(2, 5).double(), ONE, longest=4),
    "groups that do not divide": lambda: residues.weigh(X, V, ONE, longest=4, groups=3),
    "a period that does not divide": lambda: residues.weigh(X[:1], V, ONE, longest=4, period=2),
    "no block": lambda: residues.weigh(X, V, ONE, longest=0),
    "no group": lambda: residues.weigh(X, V, ONE, longest=4, groups=0),
    "two axes": lambda: residues.weigh(X[0], V, ONE, longest=4),
    "one vector": lambda: residues.weigh(X, V[0], ONE, longest=4),
    "no prime": lambda: residues.weigh(X, V, (), longest=4),
    "three primes": lambda: residues.weigh(X, V, ONE * 3, longest=4),
    "a prime too large": lambda: residues.weigh(X, V, (2**29 - 3,), longest=4),
    "rows of another size": lambda: residues.weigh_rows(X, V, V, ONE, longest=4, often=4),
    "never reduced": lambda: residues.weigh_rows(X, V, V[:, :2], ONE, longest=4, often=0),
    "a matrix of another size": lambda: residues.fold(Y, torch.zeros(2, 3, 4).double(), ONE, often=4),
    "a matrix of other repetitions": lambda: residues.fold(Y, torch.zeros(3, 3, 3).double(), ONE, often=4),
    "a prime for no modulus": lambda: residues.fold(Y, torch.zeros(2, 3, 3).double(), ONE * 2, often=4),
    "weights of other channels": lambda: residues.slide(Z, torch.zeros(2, 3).double(), ONE, **SLIDE),
    "no step": lambda: residues.slide(Z, torch.zeros(3, 3).double(), ONE, **{**SLIDE, "step": 0}),
    "a projection of other rows": lambda: project(v=torch.zeros(2, 4).double()),
    "a projection of other positions": lambda: project(down=torch.zeros(2, 3, 6).double()),
    "a projection of other repetitions": lambda: project(across=torch.zeros(1, 3, 4).double()),
    "products of other shapes": lambda: residues.dot(Z[0], Z[0, ..., :3], ONE),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_shapes_are_refused_before_memory_is_touched(wrong, monkeypatch):
    def never(*arguments):
        raise AssertionError("the library was called")

    monkeypatch.setattr(residues, "chosen", lambda: Library(never, never, never, never, never))
    with pytest.raises(ValueError, match="residues: needs"):
        wrong()


def test_what_the_library_does_not_know_is_weighed_by_the_reference(library):
    for dtype in (torch.int16, torch.int64, torch.float32, torch.float64):
        values, vectors = torch.ones(2, 4, 3, dtype=dtype), torch.full((2, 4), 5.0).double()
        options = {"longest": 3, "groups": 1, "period": 2}
        assert compiled_residues.weigh(library, values, vectors, ONE, **options) is None
        assert torch.equal(residues.weigh(values, vectors, ONE, longest=3), torch.full((1, 2, 1, 2, 3), 20).int())
    assert compiled_residues.fold(library, Y.long(), torch.zeros(2, 3, 3).double(), ONE, 4) is None
    assert compiled_residues.slide(library, Z, torch.zeros(3, 3), ONE, **SLIDE) is None
    assert compiled_residues.dot(library, Z[0], Z[0].long(), ONE) is None


GUARDED = (
    PRELUDE
    + """
import torch
from darknight.kernels import compiled_residues

beyond, primes = int(sys.argv[1]), compiled_residues.array_of((2**28 - 57, 2**28 - 89))
for kind in sys.argv[2:]:
    library = compiled_residues.Library.loaded("" if kind == "chosen" else kind)
    for outer, groups, length, columns, reps, longest in (
        (1, 1, 16, 1000, 2, 16), (3, 2, 9, 9, 3, 4), (5, 1, 37, 1, 2, 32), (2, 1, 3, 7, 1, 2), (2, 1, 5, 1030, 4, 5)
    ):
        rows = groups * length
        x, v = at_the_end(4 * outer * rows * columns), at_the_end(8 * reps * rows)
        out = at_the_end(8 * outer * groups * reps * columns)
        what = compiled_residues._Weighing(x + beyond, None, 1.0, outer, rows * columns, groups, length, columns,
                                           columns, v, reps, outer, longest, primes, 2, None, 0, out)
        library.weigh(ctypes.byref(what))
        what.x, what.values, what.factor = None, x, 64.0
        library.weigh(ctypes.byref(what))
    for n, inner, m in ((7, 7, 3), (14, 14, 3), (56, 56, 3), (9, 1, 2), (3, 1030, 1), (5, 16, 2)):
        x, w, out = at_the_end(8 * 2 * 3 * n * inner), at_the_end(8 * 2 * m * n), at_the_end(8 * 2 * 3 * m * inner)
        what = compiled_residues._Folding(x, 2, 2, 3, n, inner, w, m, 8, primes, out)
        library.fold(ctypes.byref(what))
        x, w, out = at_the_end(8 * 2 * 3 * n * inner), at_the_end(8 * 3 * m), at_the_end(8 * 2 * 3 * (n + 2) * inner)
        what = compiled_residues._Sliding(x, 2, 2, 3, 1, n, inner, w, m, 2, 1, 1, n + 2, 8, primes, out)
        library.slide(ctypes.byref(what))
        x, y, out = at_the_end(8 * 2 * 3 * n), at_the_end(8 * 2 * 3 * n), at_the_end(8 * 3)
        library.dot(ctypes.byref(compiled_residues._Product(x, y, 2, 2, 3, n, primes, out)))
    for rows, channels, height, width in (
        (1, 1, 1, 1), (8, 7, 7, 7), (3, 11, 14, 14), (20, 2, 40, 33), (2, 1, 3, 1024)
    ):
        plane = channels * height * width
        down, across = at_the_end(8 * 2 * 3 * height), at_the_end(8 * 2 * 5 * width)
        x, v, out = at_the_end(4 * rows * plane), at_the_end(8 * 2 * rows), at_the_end(8 * 2 * channels * 15)
        for integers, values in ((x, None), (None, x)):
            what = compiled_residues._Projecting(integers, values, 8.0, rows, plane, channels, height, width, v, 2,
                                                 16, down, across, 3, 5, 8, primes, 2, out)
            library.project(ctypes.byref(what))
print("done")
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guarded memory is arranged for Linux")
def test_nothing_is_read_or_written_beyond_the_end(tmp_path: Path):
    if Library.loaded() is None:
        pytest.skip("nothing was compiled")
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)
    kinds = [kind for kind in ("chosen", "avx2_", "plain_") if usable(kind)]

    def run(beyond: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(beyond), *kinds]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run(0)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert run(4).returncode < 0  # one element further, and the process dies: the test can fail


@pytest.mark.parametrize("name", ["weighing", "folding", "sliding", "product", "projecting"])
def test_what_is_handed_over_is_laid_out_as_in_the_c_file(name: str):
    """The order and the kinds of the fields: compared with the file itself."""
    assert fields_of(getattr(compiled_residues, f"_{name.capitalize()}")) == fields_in("residues.c", name)


@pytest.mark.parametrize(("lengths", "bits"), [((5, 3, 1), (22, 23, 24)), ((1000, 17), (2, 24)), ((7,), (30,))])
def test_entries_of_vectors_are_those_of_the_reference(lengths, bits):
    words = Randomness(bytes(32)).fresh().words(3 * sum(lengths), torch.int32)
    found = residues.entries(words.clone(), 3, lengths, bits)
    for vector, expected, width in zip(found, reference_residues.entries(words, 3, lengths, bits), bits, strict=True):
        assert vector.is_contiguous()
        assert vector.dtype == torch.float64
        assert torch.equal(vector, expected)
        assert vector.abs().max() <= 1 << (width - 1)
    with pytest.raises(ValueError, match="a word for each entry"):
        residues.entries(words[1:], 3, lengths, bits)
    for wrong in (words.long(), torch.stack([words, words], 1)[:, 0]):
        with pytest.raises(ValueError, match="without gaps"):
            residues.entries(wrong, 3, lengths, bits)


# --- which of the two -------------------------------------------------------------------------------------------------
@pytest.fixture
def choice(monkeypatch):
    """What is chosen, and with what words in the log, under a setting and with or without a library."""

    def made(setting: str | None, there: bool = True) -> bool:
        monkeypatch.delenv(compiled.VARIABLE, raising=False)
        if setting is not None:
            monkeypatch.setenv(compiled.VARIABLE, setting)
        monkeypatch.setattr(compiled, "installed", lambda: there)
        compiled.wanted.cache_clear()
        return compiled.wanted()

    yield made
    compiled.wanted.cache_clear()


def test_the_library_is_taken_where_there_is_one_unless_told_otherwise(choice):
    assert choice(None)
    assert choice("compiled")
    assert not choice("reference")


def test_without_a_library_the_reference_is_taken_and_the_log_says_so_once(choice, caplog):
    caplog.set_level(logging.INFO, "darknight.kernels")
    assert not choice(None, there=False)
    assert not compiled.wanted()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "C compiler" in record.getMessage()


def test_a_setting_that_cannot_be_met_is_refused(choice):
    with pytest.raises(UsageError, match="no compiled kernels"):
        choice("compiled", there=False)
    with pytest.raises(UsageError, match="known are"):
        choice("fast")


def test_a_library_of_other_sources_is_not_used(library):
    assert compiled.loaded("residues", "darknight_weigh_1", ()) is None
