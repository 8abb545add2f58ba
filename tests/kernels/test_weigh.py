"""Weighed sums: the compiled library gives what the reference gives, to the last bit, and reads nothing else."""

import logging
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from darknight.errors import UsageError
from darknight.kernels import compiled, reference, weighing

EXACT = 2**53


def built(symbol: str) -> compiled.Function:
    found = compiled._loaded(symbol)
    if found is None and shutil.which("cc") is None:
        pytest.skip("no C compiler: nothing was compiled")
    assert found is not None, "weigh.c was not built from these sources: install the package again"
    return found


@pytest.fixture(scope="module", params=["darknight_weigh_1", "darknight_weigh_plain_1"])
def function(request) -> compiled.Function:
    """The library's function, as this processor runs it best, and as any would."""
    return built(request.param)


def exact_sums(values: Tensor, vectors: Tensor, longest: int, groups: int) -> Tensor:
    """In int64, one block after the other, by the definition."""
    outer, rows, columns = values.shape
    grouped = values.to(torch.int64).reshape(outer, groups, rows // groups, 1, columns)
    weights = vectors.to(torch.int64).t().reshape(groups, rows // groups, len(vectors), 1)
    products = grouped * weights
    return torch.stack([part.sum(2) for part in products.split(longest, dim=2)])


def extremes(generator: random.Random, values: Tensor, vectors: Tensor, longest: int) -> None:
    """Everything as large as it may be, of one sign or of either."""
    entry = min(2**23, EXACT // (2**31 * longest))
    vectors.copy_(torch.full_like(vectors, -float(entry)))
    values.fill_(-(2**31))
    if generator.random() < 0.5 and values.numel():
        values.view(-1)[:: generator.randint(1, 3)] = 2**31 - 1


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


def is_repeated(values: Tensor) -> bool:
    return values.stride(0) == 0 and len(values) > 1


@pytest.mark.parametrize("seed", range(8))
def test_the_library_the_reference_and_exact_integers_agree_on_every_shape(function, seed: int, full: bool):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    for trial in range(400 if full else 60):
        groups = generator.choice([1, 1, 1, 2, 3])
        length = generator.choice([0, 1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 131])
        columns = generator.choice([0, 1, 1, 2, 3, 7, 8, 9, 9, 10, 15, 49, 63, 196, 511, 512, 513, 1100])
        outer = generator.choice([0, 1, 1, 2, 5])
        reps = generator.randint(1, 6)
        longest = generator.choice([1, 3, 4, 8, 16, 32, 1000])
        values = laid_out(generator, (outer, groups * length, columns))
        vectors = torch.randint(-(2**20), 2**20, (reps, groups * length)).to(torch.float64)
        if trial % 5 == 0:
            values = torch.empty(outer, groups * length, columns, dtype=torch.int32)
            extremes(generator, values, vectors, min(longest, max(1, length)))
        elif values.numel():
            base = values[:1] if is_repeated(values) else values
            base.copy_(torch.randint(-(2**25), 2**25, tuple(base.shape), dtype=torch.int32))
        before = values.clone()
        found = compiled.weigh(values, vectors, longest, groups, function)
        expected = reference.weigh(values, vectors, longest, groups)
        label = (trial, tuple(values.shape), values.stride(), reps, longest, groups)
        assert found.shape == expected.shape == (max(1, -(-length // longest)), outer, groups, reps, columns), label
        assert torch.equal(found, expected), label
        assert torch.equal(found.to(torch.int64), exact_sums(values, vectors, longest, groups)), label
        assert torch.equal(values, before), label


def test_a_batch_at_full_size(function):
    values = torch.randint(-(2**27), 2**27, (4, 96, 56 * 56), dtype=torch.int32)
    vectors = torch.randint(-(2**21), 2**21, (2, 96)).to(torch.float64)
    assert torch.equal(compiled.weigh(values, vectors, 32, 1, function), reference.weigh(values, vectors, 32))


def test_threads_do_not_disturb_each_other(function):
    values = [torch.randint(-(2**20), 2**20, (3, 40, 700 + i), dtype=torch.int32) for i in range(8)]
    vectors = torch.randint(-(2**20), 2**20, (2, 40)).to(torch.float64)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: compiled.weigh(each, vectors, 32, 1, function), values * 5))
    for each, sums in zip(values * 5, found, strict=True):
        assert torch.equal(sums, reference.weigh(each, vectors, 32))


WRONG = {
    "vectors too short": (torch.zeros(2, 4, 3, dtype=torch.int32), torch.zeros(2, 3).double(), 4, 1),
    "vectors too long": (torch.zeros(2, 4, 3, dtype=torch.int32), torch.zeros(2, 5).double(), 4, 1),
    "groups that do not divide": (torch.zeros(2, 4, 3, dtype=torch.int32), torch.zeros(2, 4).double(), 4, 3),
    "no block": (torch.zeros(2, 4, 3, dtype=torch.int32), torch.zeros(2, 4).double(), 0, 1),
    "no group": (torch.zeros(2, 4, 3, dtype=torch.int32), torch.zeros(2, 4).double(), 4, 0),
    "two axes": (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4).double(), 4, 1),
    "four axes": (torch.zeros(2, 4, 1, 1, dtype=torch.int32), torch.zeros(2, 4).double(), 4, 1),
    "one vector": (torch.zeros(2, 4, 3, dtype=torch.int32), torch.zeros(4).double(), 4, 1),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_shapes_are_refused_before_memory_is_touched(wrong):
    def never(*arguments):
        raise AssertionError("the library was called")

    with pytest.raises(ValueError, match="weigh: "):
        compiled.weigh(*wrong, never)
    with pytest.raises(ValueError, match="weigh: "):
        reference.weigh(*wrong)


@pytest.mark.parametrize(
    ("values", "vectors"),
    [(torch.int64, torch.float64), (torch.float32, torch.float64), (torch.int32, torch.float32)],
    ids=str,
)
def test_other_dtypes_never_reach_the_library(values: torch.dtype, vectors: torch.dtype):
    operands = torch.ones(2, 4, 3, dtype=values), torch.ones(2, 4, dtype=vectors)
    assert not compiled.suits(*operands)
    with pytest.raises(ValueError, match="weigh: "):
        compiled.weigh(*operands, 4, 1, lambda *arguments: None)


def test_what_the_library_does_not_know_is_weighed_by_the_reference():
    for dtype in (torch.int16, torch.int64, torch.float32, torch.float64):
        sums = weighing.weigh(torch.ones(2, 4, 3, dtype=dtype), torch.full((2, 4), 5.0).double(), 3)
        assert torch.equal(sums[:, 0, 0, 0, 0], torch.tensor([15.0, 5.0]).double())


GUARDED = """
import ctypes, mmap, sys
import torch
from darknight.kernels import compiled

libc = ctypes.CDLL(None)
PAGE = mmap.PAGESIZE


def at_the_end(nbytes):  # memory whose next byte cannot be touched
    pages = -(-max(1, nbytes) // PAGE)
    area = mmap.mmap(-1, (pages + 1) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert libc.mprotect(ctypes.c_void_p(start + pages * PAGE), ctypes.c_size_t(PAGE), 0) == 0
    kept.append(area)
    return start + pages * PAGE - nbytes


kept = []
beyond = int(sys.argv[1])
for symbol in ("darknight_weigh_1", "darknight_weigh_plain_1"):
    function = compiled._loaded(symbol)
    for outer, groups, length, columns, reps, longest in (
        (1, 1, 16, 1000, 2, 16), (3, 2, 9, 9, 3, 4), (5, 1, 37, 1, 2, 32), (2, 1, 3, 7, 1, 2), (2, 1, 5, 513, 6, 5)
    ):
        rows = groups * length
        sizes = 4 * outer * rows * columns, 8 * reps * rows, 8 * -(-length // longest) * outer * groups * reps * columns
        x, v, out = (at_the_end(size) for size in sizes)
        function(x + beyond, outer, rows * columns, groups, length, columns, columns, v, reps, longest, out)
print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guarded memory is arranged for Linux")
def test_nothing_is_read_or_written_beyond_the_end(tmp_path: Path):
    built("darknight_weigh_1")
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)

    def run(beyond: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(beyond)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run(0)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert run(4).returncode < 0  # one element further, and the process dies: the test can fail


# --- which of the two -------------------------------------------------------------------------------------------------
@pytest.fixture
def choice(monkeypatch):
    """What is chosen, and with what words in the log, under a setting and with or without a library."""

    def made(setting: str | None, there: bool = True) -> compiled.Function | None:
        monkeypatch.delenv(compiled.VARIABLE, raising=False)
        if setting is not None:
            monkeypatch.setenv(compiled.VARIABLE, setting)
        monkeypatch.setattr(compiled, "_loaded", lambda symbol: print if there else None)
        compiled.chosen.cache_clear()
        return compiled.chosen()

    yield made
    compiled.chosen.cache_clear()


def test_the_library_is_taken_where_there_is_one_unless_told_otherwise(choice):
    assert choice(None) is print
    assert choice("compiled") is print
    assert choice("reference") is None


def test_without_a_library_the_reference_is_taken_and_the_log_says_so_once(choice, caplog):
    caplog.set_level(logging.INFO, "darknight.kernels")
    assert choice(None, there=False) is None
    assert compiled.chosen() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "C compiler" in record.getMessage()


def test_a_setting_that_cannot_be_met_is_refused(choice):
    with pytest.raises(UsageError, match="no compiled kernels"):
        choice("compiled", there=False)
    with pytest.raises(UsageError, match="known are"):
        choice("fast")


def test_a_library_of_other_sources_is_not_used():
    built("darknight_weigh_1")
    assert compiled._loaded("darknight_weigh_0") is None
