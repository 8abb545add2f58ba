"""Fully connected layers of few rows in C: what torch gives, within rounding; AVX2 and AVX-512 the same bits."""

import ctypes
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from darknight.kernels import compiled_few_rows as kernels
from darknight.kernels.compiled_few_rows import Library

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["", "avx2_", "plain_"]
EVERY = (True, True, True)
# rows, inputs, outputs: every number of rows that is computed at a time, and rests of every loop
CASES = [
    *[(rows, 48, 7) for rows in range(1, 10)],
    *[(8, inputs, 4) for inputs in (1, 15, 16, 17, 31, 33, 63, 64, 65, 100)],
    *[(5, 40, outputs) for outputs in (1, 2, 3, 6, 63, 64, 65, 130)],
    (32, 70, 13),
    (29, 129, 66),
    (3, 4096 + 4096 + 21, 5),  # several blocks of inputs
    (2, 8192 + 40, 67),  # several blocks of columns
    (2, 1056, 1001),  # past the cache
]


def library(kind: str) -> Library:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if shutil.which("cc") is None or (kind == "avx2_" and not (" avx2 " in flags and " fma " in flags)):
        pytest.skip("no C compiler, or another processor")
    found = Library.loaded(kind)
    assert found is not None, "few_rows.c was not built from these sources: install the package again"
    return found


def drawn(case):
    rows, inputs, outputs = case
    torch.manual_seed(3)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    return x, weight, torch.randn(outputs), torch.randn(rows, outputs)


def by_torch(x, weight, bias, grad):
    operands = [each.double().requires_grad_() for each in (x, weight, bias)]
    y = F.linear(*operands)
    return y.detach(), *torch.autograd.grad(y, operands, grad.double())


def assert_rounded(mine: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor) -> None:
    """Within the rounding of a sum whose terms have these magnitudes in total."""
    assert mine.shape == exact.shape
    assert bool(((mine.double() - exact).abs() <= 2e-6 * sizes + 1e-30).all())


def everything(lib: Library, x, weight, bias, grad):
    return kernels.multiply(lib, x, weight, bias), *kernels.multiply_back(lib, x, weight, grad, EVERY)


def try_every_kind(case, kinds=KINDS):
    operands = drawn(case)
    exact, sizes = by_torch(*operands), by_torch(*(each.abs() for each in operands))
    found = {kind: everything(library(kind), *operands) for kind in kinds}
    for each in found.values():
        for mine, expected, size in zip(each, exact, sizes, strict=True):
            assert_rounded(mine, expected, size)
    fused = [each for kind, each in found.items() if kind != "plain_"]
    if len(fused) == 2:
        assert all(torch.equal(one, other) for one, other in zip(*fused, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_torch_and_the_same_bits_with_and_without_avx512(case):
    try_every_kind(case)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_of_many_terms_of_one_sign_is_as_exact(kind):
    """Where rounding adds up: sums are of sums."""
    x, weight, bias, grad = (each.abs() for each in drawn((3, 9000, 700)))
    exact = by_torch(x, weight, bias, grad)
    for mine, expected in zip(everything(library(kind), x, weight, bias, grad), exact, strict=True):
        assert_rounded(mine, expected, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_how_many_others_there_are(kind):
    x, weight, bias, grad = drawn((32, 5001, 131))
    lib = library(kind)
    y, (gx, *_) = kernels.multiply(lib, x, weight, bias), kernels.multiply_back(lib, x, weight, grad, EVERY)
    for rows in (1, 3, 8, 11):
        some, part = x[-rows:].contiguous(), grad[-rows:].contiguous()
        assert torch.equal(kernels.multiply(lib, some, weight, bias), y[-rows:])
        assert torch.equal(kernels.multiply_back(lib, some, weight, part, (True, False, False))[0], gx[-rows:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [(7, 37, 11), (8, 64, 12), (2, 1056, 1001)], ids=str)
def test_nothing_around_a_result_is_written_wherever_it_begins(kind, case):
    x, weight, bias, grad = drawn(case)
    lib = library(kind)
    expected = everything(lib, x, weight, bias, grad)
    for offset in (0, 1, 16):
        laid, what = kernels._laid_out(lib, x), kernels._product(x, weight)
        rooms = [torch.full((each.numel() + 64 + offset,), 123.0) for each in expected]
        places = [room.data_ptr() + 4 * (16 + offset) for room in rooms]
        what.x, what.bias, what.grad = laid.data_ptr(), bias.data_ptr(), grad.data_ptr()
        what.y, what.grad_x, what.grad_weight, what.grad_bias = places
        for function, length in (("multiply", case[2]), ("derive_x", case[1]), ("derive_weight", case[2])):
            what.first, what.last = 0, length
            getattr(lib, function)(ctypes.byref(what))
        for room, each in zip(rooms, expected, strict=True):
            start, end = 16 + offset, 16 + offset + each.numel()
            assert torch.equal(room[start:end].view_as(each), each)
            assert bool((room[:start] == 123.0).all())
            assert bool((room[end:] == 123.0).all())


def test_a_gradient_that_is_not_wanted_is_left_out_and_changes_no_other():
    x, weight, _, grad = drawn((9, 100, 50))
    whole = kernels.multiply_back(library(""), x, weight, grad, EVERY)
    for number in range(8):
        wanted = tuple(bool(number >> place & 1) for place in range(3))
        found = kernels.multiply_back(library(""), x, weight, grad, wanted)
        for mine, every, asked in zip(found, whole, wanted, strict=True):
            assert torch.equal(mine, every) if asked else mine is None


def test_what_is_not_finite_goes_where_it_does_in_torch():
    x, weight, bias, grad = drawn((9, 70, 13))
    x[2, 69], weight[5, 3], grad[4, 12] = float("nan"), float("inf"), float("-inf")
    operands = [each.clone().requires_grad_() for each in (x, weight, bias)]
    y = F.linear(*operands)
    theirs = (y.detach(), *torch.autograd.grad(y, operands, grad))
    for mine, each in zip(everything(library(""), x, weight, bias, grad), theirs, strict=True):
        assert torch.equal(mine.isfinite(), each.isfinite())


def test_what_is_not_for_the_library_is_left_to_torch():
    lib = library("")
    x, weight, bias, grad = drawn((4, 6, 5))
    for other in (x.double(), x.t(), x[:0], x[0], x[:, :5], torch.randn(33, 6), torch.randn(2, 2, 6), x[:, ::2]):
        assert kernels.multiply(lib, other, weight, bias) is None
    for other in (weight.double(), weight[:0], weight.t(), torch.randn(6, 5).t(), weight[None], weight[0]):
        assert kernels.multiply(lib, x, other, bias) is None
    for other in (bias.double(), bias[:4], bias[None], torch.randn(10)[::2]):
        assert kernels.multiply(lib, x, weight, other) is None
    for other in (grad.double(), grad[:3], grad[:, :4], torch.randn(5, 4).t()):
        assert kernels.multiply_back(lib, x, weight, other, EVERY) is None


def test_what_is_handed_over_is_laid_out_as_in_the_c_file():
    bare = re.sub(r"/\*.*?\*/", "", Path(kernels.__file__).with_name("few_rows.c").read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct \{([^}]*)\} product;", bare)
    fields = []
    for line in filter(str.strip, body.split(";")):
        names = re.match(r"\s*(?:const )?\w+ (.*)", line, re.DOTALL).group(1)
        fields += [(each.strip(" *\n"), "*" in each) for each in names.split(",")]
    assert [(field, kind is ctypes.c_void_p) for field, kind in kernels._Product._fields_] == fields
    sizes = {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+)", bare)}
    assert (sizes["MOST_ROWS"], sizes["OVERRUN"]) == (kernels._MOST_ROWS, kernels._OVERRUN)
    # Threads divide where no loop has a rest: so the same loops run over the same numbers.
    outs, vectors = (re.findall(rf"#define {name} (\d+)", bare) for name in ("DOT_OUTS", "BACK_VECTORS"))
    assert all(kernels._OUTPUTS % int(each) == 0 for each in outs)
    assert all(kernels._INPUTS % (int(each) * 16) == 0 for each in vectors)
