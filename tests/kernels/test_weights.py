"""New weights in one pass: the integers, scale and sums that several passes give, to the last bit."""

import ctypes
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from darknight.kernels import compiled_weights as kernels
from darknight.kernels import reference
from kernels.guarded import PRELUDE

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["", "avx2_", "plain_"]
SHAPES = [
    (1, 1),
    (3, 5),
    (7, 16),
    (2, 1025),
    (130, 17),  # more rows than are summed in 32 bits
    (257, 3, 3, 3),
    (5, 4, 1, 1),
    (4, 2, 7, 11),
    (3, 700, 3),
]


def function(kind):
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if shutil.which("cc") is None or (kind == "avx2_" and " avx2 " not in flags):
        pytest.skip("no C compiler, or another processor")
    found = kernels.loaded(kind)
    assert found is not None, "weights.c was not built from these sources: install the package again"
    return found


def placed(values, shift):
    """The same values, `shift` numbers behind the beginning of their memory."""
    memory = torch.empty(values.numel() + shift, dtype=values.dtype)
    return memory[shift:].view(values.shape).copy_(values)


def assert_same(found, expected):
    assert torch.equal(found.integers, expected.integers)
    assert found.integers.dtype == torch.int32
    assert found.largest == expected.largest
    assert (found.moments is None) == (expected.moments is None)
    for mine, theirs in zip(found.moments or (), expected.moments or (), strict=True):
        assert mine.dtype == theirs.dtype == torch.int64
        assert torch.equal(mine, theirs)
    assert (found.earlier is None) == (expected.earlier is None)
    if found.earlier is not None:
        assert found.earlier.dtype == torch.int16
        assert torch.equal(found.earlier, expected.earlier)


def agree(shape, bits, shift):
    torch.manual_seed(bits + shift)
    earlier = placed(torch.randint(-(2**bits), 2**bits + 1, shape, dtype=torch.int32), shift)
    for exponent in (-40, 0, 9, 100):
        for made in (torch.randn(shape).clamp_(-3, 3) / 4, torch.full(shape, -1.0), torch.zeros(shape)):
            # Halves, which go to the even one; and the largest that have so many bits.
            made.view(-1)[::3] = (torch.arange(len(made.view(-1)[::3])) % 2**bits + 0.5) * 2.0**-bits
            values = placed(made.clamp_(-1 + 2.0**-20, 1 - 2.0**-20) * 2.0 ** (bits - exponent), shift)
            for before in (None, earlier):
                for counted in (True, False):
                    expected = reference.requantise(values, exponent, bits, counted=counted, earlier=before)
                    assert expected is not None
                    for kind in KINDS:
                        assert kernels.suits(values, exponent, bits, before)
                        found = kernels.requantise(
                            function(kind), values, exponent, bits, counted=counted, earlier=before
                        )
                        assert_same(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [4, 10, 12])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_one_pass_gives_what_several_do(shape, bits, shift):
    agree(shape, bits, shift)


def past_the_cache(kind):
    torch.manual_seed(0)
    for shift in (0, 1):
        values = placed(torch.randn(1031, 1024).clamp_(-3.9, 3.9), shift)
        earlier = placed(torch.randint(-1024, 1025, values.shape, dtype=torch.int32), shift)
        expected = reference.requantise(values, 8, 10, counted=True, earlier=earlier)
        assert_same(kernels.requantise(function(kind), values, 8, 10, counted=True, earlier=earlier), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_past_the_cache_is_the_same(kind):
    past_the_cache(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_exact_when_every_number_is_as_large_as_it_can_be(kind):
    values = torch.full((300, 1, 1500), 1 - 2.0**-24)  # rounds up to 2^12
    found = kernels.requantise(function(kind), values, 12, 12, counted=True, earlier=None)
    assert found.moments[0].tolist() == [[1500 * 2**12, 1500 * 2**24]] * 300
    assert found.moments[1].tolist() == [[300 * 1500 * 2**12, 300 * 1500 * 2**24]]


@pytest.mark.parametrize("strange", [math.nan, -math.nan, math.inf, -math.inf, 4.0, -4.0, 3e38])
@pytest.mark.parametrize("place", [0, 1023, 1030, 2059])
def test_a_magnitude_that_does_not_fit_is_noticed_anywhere(strange, place):
    values = torch.full((2, 1030), 3.99)
    by_reference = reference.requantise(values, 8, 10, counted=True, earlier=None)
    assert by_reference is not None
    changed = values.clone()
    changed.view(-1)[place] = strange
    assert reference.requantise(changed, 8, 10, counted=True, earlier=None) is None
    for kind in KINDS:
        assert_same(kernels.requantise(function(kind), values, 8, 10, counted=True, earlier=None), by_reference)
        assert kernels.requantise(function(kind), changed, 8, 10, counted=True, earlier=None) is None


def test_magnitudes_far_below_the_scale_are_still_told():
    values = torch.tensor([[1e-30, -3e-30], [0.0, 2e-30]])
    for kind in KINDS:
        found = kernels.requantise(function(kind), values, -100, 10, counted=True, earlier=None)
        assert found.largest == float(values.abs().max())
        assert not found.integers.any()


def test_what_is_not_for_the_library_is_left_to_the_reference():
    values, earlier = torch.randn(6, 4), torch.zeros(6, 4, dtype=torch.int32)
    assert kernels.suits(values, 3, 10, earlier)
    for other in (values.double(), values.bfloat16(), values.t(), values[:, ::2], values[:0], values[0]):
        assert not kernels.suits(other, 3, 10, None)
    for other in (earlier.long(), earlier[:5], earlier.t(), earlier.view(4, 6)):
        assert not kernels.suits(values, 3, 10, other)
    assert not kernels.suits(values, 3, 13, None)
    assert not kernels.suits(values, 127, 10, None)


def test_what_is_handed_over_is_laid_out_as_in_the_c_file():
    bare = re.sub(r"/\*.*?\*/", "", Path(kernels.__file__).with_name("weights.c").read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct \{([^}]*)\} requantisation;", bare)
    fields = []
    for line in filter(str.strip, body.split(";")):
        kind, names = re.match(r"\s*(?:const )?(\w+) (.*)", line, re.DOTALL).groups()
        fields += [(each.strip(" *\n"), "pointer" if "*" in each else kind) for each in names.split(",")]
    kinds = {ctypes.c_float: "float", ctypes.c_int64: "int64_t"}
    assert [(name, kinds.get(kind, "pointer")) for name, kind in kernels._Requantisation._fields_] == fields


GUARDED = (
    PRELUDE
    + """
from darknight.kernels import compiled_weights as kernels

for kind in ("", "plain_"):
    for outer, channels, inner in ((1, 1, 1), (3, 5, 9), (129, 1024, 1), (2, 1025, 1), (3, 400_003, 1)):
        n, length = outer * channels * inner, channels * inner
        x, known, q, narrow = (at_the_end(size) for size in (4 * n, 4 * n, 4 * n, 2 * n))
        rows, columns, room = (at_the_end(size) for size in (16 * outer, 16 * channels, 8 * length))
        x += int(sys.argv[1])
        what = kernels._Requantisation(x, known, q, narrow, outer, channels, inner, 2.0, 8.0, rows, columns, room)
        assert kernels.loaded(kind)(ctypes.byref(what)) == 0.0
print("done")
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guarded memory is arranged for Linux")
def test_nothing_is_read_or_written_beyond_the_end(tmp_path: Path):
    function("")
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)

    def run(beyond: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(beyond)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run(0)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert run(4).returncode < 0  # one element further, and the process dies: the test can fail
