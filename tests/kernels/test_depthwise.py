"""Depthwise convolution in C: what torch gives, within rounding; every variant the same bits."""

import ctypes
import re
import shutil
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from darknight.kernels import compiled_depthwise as kernels
from darknight.kernels import compiled_layers
from darknight.kernels.compiled_depthwise import Library
from darknight.kernels.compiled_layers import Affine, Window
from kernels.guarded import PRELUDE
from kernels.test_residues import usable

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["", "avx2_", "plain_"]
# kernel, step, before, (examples, channels), (height, width)
CASES = [
    ((3, 3), (1, 1), (1, 1), (2, 5), (7, 7)),
    ((3, 3), (1, 1), (1, 1), (40, 3), (7, 7)),  # several planes at a time, and channels that do not divide them
    ((3, 3), (1, 1), (1, 1), (2, 3), (30, 41)),
    ((3, 3), (1, 1), (0, 2), (1, 3), (19, 5)),
    ((3, 3), (2, 2), (1, 1), (2, 3), (14, 9)),
    ((3, 3), (2, 2), (1, 1), (2, 3), (33, 112)),
    ((3, 3), (2, 2), (0, 1), (3, 2), (8, 13)),
    ((3, 3), (1, 1), (2, 2), (2, 3), (9, 33)),
    ((3, 3), (2, 2), (2, 0), (2, 3), (21, 66)),
    ((3, 3), (1, 2), (1, 1), (2, 3), (12, 37)),
    ((5, 5), (1, 1), (2, 2), (2, 3), (14, 17)),
    ((5, 5), (2, 2), (2, 2), (2, 3), (28, 23)),
    ((5, 5), (2, 2), (4, 3), (1, 2), (9, 6)),
    ((7, 7), (1, 1), (3, 3), (2, 2), (10, 12)),
    ((3, 5), (2, 1), (1, 2), (2, 3), (11, 6)),
    ((2, 4), (1, 2), (1, 0), (2, 3), (6, 11)),
    ((1, 1), (2, 2), (0, 0), (2, 3), (4, 5)),  # most inputs are met by no tap
    ((3, 3), (1, 1), (1, 1), (1, 2), (1, 1)),
    ((3, 3), (2, 2), (2, 2), (3, 1), (1, 2)),
    ((3, 3), (1, 1), (1, 1), (1, 2), (5, 700)),  # a line at a time
    ((3, 3), (2, 2), (1, 1), (1, 2), (5, 1500)),
]


def library(kind: str) -> Library:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if shutil.which("cc") is None or (kind == "avx2_" and " avx2 " not in flags):
        pytest.skip("no C compiler, or another processor")
    found = Library.loaded(kind)
    assert found is not None, "depthwise.c was not built from these sources: install the package again"
    return found


def assert_rounded(mine: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor) -> None:
    """Within the rounding of a sum whose terms have these magnitudes in total."""
    assert mine.shape == exact.shape
    assert bool(((mine.double() - exact).abs() <= 2e-6 * sizes + 1e-30).all())


def drawn(case):
    kernel, step, before, (examples, channels), size = case
    torch.manual_seed(3)
    x, weight = torch.randn(examples, channels, *size), torch.randn(channels, 1, *kernel)
    window = Window(kernel, step, before)
    return x, weight, torch.randn(channels), torch.randn(examples, channels, *window.outputs(*size)), window


def by_torch(x, weight, bias, grad, window):
    operands = [each.double().requires_grad_() for each in (x, weight, bias)]
    y = F.conv2d(*operands, window.step, window.before, 1, x.shape[1])
    return y.detach(), *torch.autograd.grad(y, operands, grad.double())


def try_every_kind(case, kinds=KINDS):
    x, weight, bias, grad, window = drawn(case)
    exact = by_torch(x, weight, bias, grad, window)
    sizes = by_torch(*(each.abs() for each in (x, weight, bias, grad)), window)
    found = {}
    for kind in kinds:
        y = kernels.convolve(library(kind), x, weight, bias, window)
        grads = kernels.convolve_back(library(kind), x, weight, grad, window, (True, True, True))
        for mine, expected, size in zip((y, *grads), exact, sizes, strict=True):
            assert_rounded(mine, expected, size)
        assert_finished(library(kind), x, weight, bias, window, y)
        found[kind] = (y, *grads)
    for kind in kinds[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[kinds[0]], found[kind], strict=True)), kind


def assert_finished(lib, x, weight, bias, window, y) -> None:
    """With what stands behind it: the bits of the passes apart."""
    layers = compiled_layers.Library.loaded()
    by = Affine(*torch.randn(2, x.shape[1], generator=torch.Generator().manual_seed(6)))
    one, none = Affine(torch.ones(x.shape[1]), torch.full((x.shape[1],), -0.0)), None
    for scaling, limits in ((by, none), (by, (0.0, 6.0)), (by, (0.0, inf)), (none, (0.0, 6.0))):
        expected = compiled_layers.affine(layers, y, (scaling or one).scale, (scaling or one).shift, limits)
        assert torch.equal(kernels.convolve(lib, x, weight, bias, window, scaling, limits), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_torch_and_the_same_bits_in_every_variant(case):
    try_every_kind(case)


def test_a_gradient_that_is_not_wanted_is_left_out_and_changes_no_other():
    x, weight, _, grad, window = drawn(CASES[0])
    whole = kernels.convolve_back(library(""), x, weight, grad, window, (True, True, True))
    for index in range(3):
        wanted = tuple(each != index for each in range(3))
        found = kernels.convolve_back(library(""), x, weight, grad, window, wanted)
        assert found[index] is None
        assert all(torch.equal(found[each], whole[each]) for each in range(3) if each != index)


def test_nothing_behind_a_result_is_written():
    for case in CASES:
        x, weight, bias, _, window = drawn(case)
        expected = kernels.convolve(library(""), x, weight, bias, window)
        behind = torch.full((expected.numel() + 64,), 123.0)
        what, lines = kernels._convolution(x, weight, window)
        what.y, what.bias = behind.data_ptr(), bias.data_ptr()
        library("").convolve(ctypes.byref(what))
        assert torch.equal(behind[: expected.numel()].reshape(expected.shape), expected)
        assert bool((behind[expected.numel() :] == 123.0).all())
        del lines


def test_a_channel_that_is_not_finite_reaches_no_other():
    x, weight, _, grad, window = drawn(CASES[1])
    clean = kernels.convolve_back(library(""), x, weight, grad, window, (True, True, True))
    before = kernels.convolve(library(""), x, weight, None, window)
    x[:, 1] = float("nan")
    grad[:, 1] = float("inf")
    after = kernels.convolve(library(""), x, weight, None, window)
    gx, gw, gb = kernels.convolve_back(library(""), x, weight, grad, window, (True, True, True))
    assert after[:, 1].isnan().all()
    assert gw[1].isnan().all()
    for channel in (0, 2):
        assert torch.equal(after[:, channel], before[:, channel])
        assert torch.equal(gx[:, channel], clean[0][:, channel])
        assert torch.equal(gw[channel], clean[1][channel])
        assert torch.equal(gb[channel], clean[2][channel])


def test_what_is_not_for_the_library_is_left_to_torch():
    lib, window = library(""), Window((3, 3), (1, 1), (1, 1))
    x, weight = torch.randn(2, 3, 6, 8), torch.randn(3, 1, 3, 3)
    for other in (x.double(), x.transpose(2, 3), x[:0], x[0], x[:, :2], x.to(memory_format=torch.channels_last)):
        assert kernels.convolve(lib, other, weight, None, window) is None
    for other in (weight.double(), weight[:2], torch.randn(6, 1, 3, 3), torch.randn(3, 3, 3, 3), weight[..., ::2]):
        assert kernels.convolve(lib, x, other, None, window) is None
    for bias in (torch.zeros(4), torch.zeros(3).double()):
        assert kernels.convolve(lib, x, weight, bias, window) is None
        assert kernels.convolve(lib, x, weight, None, window, Affine(torch.zeros(3), bias)) is None
    steps = [Window((3, 3), (3, 1), (1, 1)), Window((3, 3), (1, 1), (3, 1)), Window((3, 3), (0, 1), (1, 1))]
    for other in steps:
        assert kernels.convolve(lib, x, weight, None, other) is None
    assert (
        kernels.convolve(lib, torch.randn(1, 3, 9, 9), torch.randn(3, 1, 8, 8), None, Window((8, 8), (1, 1), (0, 0)))
        is None
    )
    assert kernels.convolve(lib, torch.randn(1, 3, 2, 2), weight, None, Window((3, 3), (1, 1), (0, 0))) is None
    assert kernels.convolve(lib, torch.randn(1, 3, 3, 2000), weight, None, window) is None
    for grad in (torch.randn(2, 3, 6, 7), torch.randn(2, 3, 6, 8).double(), torch.randn(2, 3, 8, 6).transpose(2, 3)):
        assert kernels.convolve_back(lib, x, weight, grad, window, (True, True, True)) is None


def test_what_is_handed_over_is_laid_out_as_in_the_c_file():
    bare = re.sub(r"/\*.*?\*/", "", Path(kernels.__file__).with_name("depthwise.c").read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct \{([^}]*)\} convolution;", bare)
    fields = []
    for line in filter(str.strip, body.split(";")):
        names = re.match(r"\s*(?:const )?\w+ (.*)", line, re.DOTALL).group(1)
        fields += [(each.strip(" *\n"), "*" in each) for each in names.split(",")]
    assert [(field, kind is ctypes.c_void_p) for field, kind in kernels._Convolution._fields_] == fields
    sizes = {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+)", bare)}
    assert (sizes["LANES"], sizes["MOST_OUT"]) == (kernels._LANES, kernels._WIDEST)
    assert sizes["MOST_TAPS"] == kernels._LARGEST**2
    # In front of held rows, behind lines, the end of the last loop over lanes, and columns before the first.
    assert sizes["SLACK"] + sizes["BEHIND"] + 2 * sizes["LANES"] + kernels._LARGEST <= kernels._ROOM_AROUND


GUARDED = (
    PRELUDE
    + """
import torch

from darknight.kernels import compiled_depthwise as depthwise
from darknight.kernels.compiled_layers import Window

beyond = int(sys.argv[1])
for kind in sys.argv[2:]:
    library = depthwise.Library.loaded("" if kind == "chosen" else kind)
    for step, (planes, channels, height, width) in (
        (1, (1, 1, 1, 1)), (1, (6, 3, 7, 7)), (2, (6, 3, 14, 15)),
        (1, (2, 2, 9, 16)), (1, (2, 1, 20, 33)), (2, (2, 2, 9, 112)),
    ):
        layout = depthwise._Layout.of(torch.empty(1, 1, height, width), Window((3, 3), (step, step), (1, 1)))
        outputs = [(size - 1) // step + 1 for size in (height, width)]
        what = depthwise._Convolution(
            x=at_the_end(4 * planes * height * width) + beyond, weight=at_the_end(4 * 9 * channels),
            y=at_the_end(4 * planes * outputs[0] * outputs[1]),
            lines=at_the_end(4 * layout.together * step**2 * layout.room),
            scale=at_the_end(4 * channels), shift=at_the_end(4 * channels), low=0.0, high=6.0, limited=1,
            planes=planes, channels=channels, height=height, width=width, out_height=outputs[0], out_width=outputs[1],
            kernel_height=3, kernel_width=3, step_height=step, step_width=step, before_height=1, before_width=1,
            pitch=layout.pitch, rows=layout.rows, together=layout.together, room=layout.room)
        library.convolve(ctypes.byref(what))
print("done")
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guarded memory is arranged for Linux")
def test_nothing_is_read_or_written_beyond_the_end(tmp_path: Path):
    if Library.loaded() is None:
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
