"""What stays in the enclave, in C: what torch gives, within rounding; every variant the same bits."""

import ctypes
import re
import shutil
from math import inf
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from darknight.kernels import compiled_layers as kernels
from darknight.kernels.compiled_layers import Affine, Library, Window

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["", "avx2_", "plain_"]
SHAPES = [
    (2, 1),
    (1, 1, 2),
    (5, 3),
    (3, 2, 7),
    (2, 17, 15),
    (4, 5, 3, 5),
    (2, 3, 33, 37),
    (3, 20, 7, 7),
    (2, 70, 3),  # more channels than are done at a time
    (2, 3, 544),  # whole lines, more than are fetched ahead
    (2, 2, 3, 4, 5),
]
WINDOWS = [
    (Window((2, 2), (2, 2), (0, 0)), (6, 8)),
    (Window((2, 2), (2, 2), (0, 0)), (7, 47)),  # a row and a column that no window meets
    (Window((3, 3), (2, 2), (1, 1)), (7, 10)),
    (Window((3, 2), (1, 3), (1, 0)), (5, 11)),
    (Window((1, 5), (4, 1), (0, 2)), (9, 5)),
    (Window((3, 3), (3, 3), (1, 1)), (1, 2)),
    (Window((15, 15), (2, 5), (7, 6)), (20, 17)),
    (Window((3, 3), (2, 2), (1, 1)), (9, 71)),  # several lines of outputs
    (Window((5, 3), (1, 1), (2, 1)), (6, 40)),
    (Window((1, 20), (3, 2), (0, 10)), (5, 66)),
]
LARGE = 1 << 22  # numbers that are written past the cache: as in layers.c
LIMITS = [None, (0.0, inf), (0.0, 6.0), (-0.5, 0.5)]


def library(kind: str) -> Library:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if shutil.which("cc") is None or (kind == "avx2_" and " avx2 " not in flags):
        pytest.skip("no C compiler, or another processor")
    found = Library.loaded(kind)
    assert found is not None, "layers.c was not built from these sources: install the package again"
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "bare"])
def test_a_batch_is_normalised_as_torch_does_and_derived(shape, affine):
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64) * 3 + 2
    weight, bias = (torch.randn(shape[1], dtype=torch.float64) if affine else None for _ in range(2))
    means, variances = torch.randn(shape[1]), torch.rand(shape[1])
    for limits in LIMITS:
        operands = [each.clone().requires_grad_() for each in (x, weight, bias) if each is not None]
        wide = means.double(), variances.double()
        y = F.batch_norm(operands[0], *wide, *(operands[1:] or (None, None)), training=True, momentum=0.3)
        passed = y if limits is None else torch.where((y > limits[0]) & (y < limits[1]), y, y.detach())
        grad = torch.randn(shape, dtype=torch.float64)
        expected = torch.autograd.grad(passed, operands, grad)
        found = {}
        for kind in KINDS:
            running = means.clone(), variances.clone()
            narrow = [None if each is None else each.float() for each in (weight, bias)]
            values, by = kernels.normalise(library(kind), x.float(), *narrow, running, 0.3, 1e-5)
            back, *rest = kernels.derive(library(kind), x.float(), grad.float(), by, limits)
            grads = [back.grad, *rest]
            assert back.largest == float(back.grad.abs().max())
            if limits is not None:  # finished at once: the same bits as in two passes
                again = means.clone(), variances.clone()
                cut, _ = kernels.normalise(library(kind), x.float(), *narrow, again, 0.3, 1e-5, limits)
                assert torch.equal(cut, activated(values, limits))
                affine_of = kernels.affine(library(kind), x.float(), by.scale, by.shift, limits)
                assert torch.equal(affine_of, cut)
                grads.append(assert_added(library(kind), x.float(), *narrow, by, grad.float(), limits))
            torch.testing.assert_close(values.double(), y.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(running[0].double(), wide[0], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(running[1].double(), wide[1], rtol=1e-5, atol=1e-6)
            # An element whose y lies at a limit passes in one and not in the other: not with these seeds.
            for mine, theirs in zip(grads, expected, strict=False):
                torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max() + 1))
            found[kind] = [values, *running, *grads]
        for kind in KINDS[1:]:
            assert all(torch.equal(one, other) for one, other in zip(found[""], found[kind], strict=True)), kind


def test_what_is_written_past_the_cache_has_the_same_bits():
    torch.manual_seed(6)
    x, grad, added = (torch.randn(2, 4, 512, LARGE // 4096) for _ in range(3))
    weight, bias = torch.rand(4) + 0.5, torch.randn(4)
    window, limits = Window((2, 2), (2, 2), (0, 0)), (0.0, 6.0)
    found = {}
    for kind in KINDS[:2]:
        lib = library(kind)
        y, by = kernels.normalise(lib, x, weight, bias, None, 0.1, 1e-5, limits)
        total, _ = kernels.normalise(lib, x, weight, bias, None, 0.1, 1e-5, limits, added)
        scaled = kernels.affine(lib, x, by.scale, by.shift, limits, added)
        back, *rest = kernels.derive(lib, x, grad, by, limits)
        both, *others = kernels.derive(lib, x, grad, by, limits, total)
        returned = kernels.come_back(lib, grad, 1, y, limits)
        pooled, taps = kernels.pool(lib, y, window, keep=True)
        spread = kernels.unpool(lib, pooled, taps, y.shape, window)
        assert back.largest == float(back.grad.abs().max())
        found[kind] = [
            y,
            total,
            scaled,
            back.grad,
            *rest,
            both.grad,
            *others,
            returned.grad,
            returned.sums,
            pooled,
            taps,
            spread,
        ]
    assert all(torch.equal(one, other) for one, other in zip(*found.values(), strict=True))


def assert_added(lib, x, weight, bias, by, grad, limits):
    """With a sum before the activation: the bits of three passes forward, and of two backward. What passed."""
    generator = torch.Generator().manual_seed(5)
    added = torch.randn(x.shape, generator=generator)
    added.view(-1)[0] = float("nan")  # which passes
    plain, _ = kernels.normalise(lib, x, weight, bias, None, 0.3, 1e-5)
    for cut in (None, limits):
        y, _ = kernels.normalise(lib, x, weight, bias, None, 0.3, 1e-5, cut, added)
        expected = activated(plain + added, cut)
        scaled = kernels.affine(lib, x, by.scale, by.shift, cut, added)
        assert all(torch.equal(each.nan_to_num(123.0), expected.nan_to_num(123.0)) for each in (y, scaled))
    together, *rest, passed = kernels.derive(lib, x, grad, by, limits, y)
    assert torch.equal(passed, kernels.come_back(lib, grad, 1, y, limits).grad)
    apart, *others, _ = kernels.derive(lib, x, passed, by, None)
    assert together.largest == apart.largest
    assert all(torch.equal(*pair) for pair in zip((together.grad, *rest), (apart.grad, *others), strict=True))
    return passed


def test_a_channel_far_from_zero_and_one_without_spread_stay_finite():
    x = torch.cat([torch.full((4, 1, 9), 1000.0) + torch.randn(4, 1, 9), torch.full((4, 1, 9), 7.0)], dim=1)
    y, by = kernels.normalise(library(""), x, None, None, None, 0.1, 1e-5)
    torch.testing.assert_close(y, F.batch_norm(x.double(), None, None, training=True).float(), rtol=1e-3, atol=2e-3)
    back, *rest = kernels.derive(library(""), x, torch.ones_like(x), by, None)
    assert all(bool(each.isfinite().all()) for each in (y, back.grad, *rest))


def test_nan_and_infinity_reach_the_result_as_in_torch():
    x = torch.randn(3, 2, 4, 4)
    x[1, 0, 2, 1] = float("nan")
    y, _ = kernels.normalise(library(""), x, None, None, None, 0.1, 1e-5)
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()
    x[1, 1, 0, 3] = -inf
    for window in (Window((3, 3), (2, 2), (1, 1)), Window((2, 3), (1, 1), (0, 1)), Window((2, 2), (2, 2), (0, 0))):
        again = x.clone().requires_grad_()
        expected = F.max_pool2d(again, window.kernel, window.step, window.before)
        (gx,) = torch.autograd.grad(expected, again, torch.ones_like(expected))
        for kind in KINDS:
            pooled, taps = kernels.pool(library(kind), x, window, keep=True)
            assert torch.equal(pooled.nan_to_num(123.0), expected.nan_to_num(123.0))
            assert torch.equal(kernels.unpool(library(kind), torch.ones_like(pooled), taps, x.shape, window), gx)
    pooled, _ = kernels.pool(library(""), x, Window((2, 2), (2, 2), (0, 0)), keep=True)
    assert torch.equal(pooled.nan_to_num(123.0), F.max_pool2d(x, 2).nan_to_num(123.0))
    whole = torch.full((1, 1, 4, 4), -inf)
    pooled, taps = kernels.pool(library(""), whole, Window((3, 3), (2, 2), (1, 1)), keep=True)
    assert torch.equal(pooled, F.max_pool2d(whole, 3, 2, 1))
    assert (
        kernels.unpool(library(""), torch.ones_like(pooled), taps, whole.shape, Window((3, 3), (2, 2), (1, 1))).sum()
        == 4
    )


def activated(y, limits):
    """As torch.nn's modules do it."""
    if limits is None:
        return y
    return F.relu(y) if limits == (0.0, inf) else F.hardtanh(y, *limits)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channel", [1, -1])
def test_a_product_is_finished_as_torch_does_it_to_the_bit(shape, channel):
    torch.manual_seed(3)
    y = torch.randint(-40, 41, shape) / 8.0  # with many that are at a limit
    y.view(-1)[0] = float("nan")
    along = (-1, *[1] * (y.dim() - 1 - channel % y.dim()))
    scale, shift = torch.randn(2, shape[channel])
    for bias in (torch.randint(-8, 9, (shape[channel],)) / 8.0, None):
        raw = y if bias is None else y + bias.view(along)
        for limits in LIMITS:
            expected = activated(raw, limits)
            scaled = activated(raw * scale.view(along) + shift.view(along), limits)
            for kind in KINDS:
                for scaling, wanted in ((None, expected), (Affine(scale, shift), scaled)):
                    found = y.clone()
                    assert kernels.finish(library(kind), found, channel, bias, limits, scaling)
                    assert torch.equal(found.nan_to_num(123.0), wanted.nan_to_num(123.0))


@pytest.mark.parametrize("channels", [1, 5, 33])
def test_running_statistics_become_a_scale_and_a_shift(channels):
    torch.manual_seed(5)
    mean, variance = torch.randn(channels), torch.rand(channels)
    for weight, bias in ((torch.randn(channels), torch.randn(channels)), (None, None)):
        inverse = (variance.double() + 1e-3).rsqrt()
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else -mean * scale + bias
        x = torch.randn(2, channels, 3)
        wide = [None if each is None else each.double() for each in (x, mean, variance, weight, bias)]
        for kind in KINDS:
            by = kernels.by_running(library(kind), mean, variance, weight, bias, 1e-3)
            assert torch.equal(by.scale, scale.float())
            assert torch.equal(by.shift, shift.float())
            y = kernels.affine(library(kind), x, by.scale, by.shift)
            torch.testing.assert_close(y.double(), F.batch_norm(*wide, eps=1e-3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channel", [1, -1])
def test_gradients_come_back_as_in_torch_with_their_sums_and_their_magnitude(shape, channel):
    torch.manual_seed(4)
    x, grad = torch.randint(-40, 41, shape) / 8.0, torch.randn(shape)
    axes = [axis for axis in range(x.dim()) if axis != channel % x.dim()]
    for limits in LIMITS:
        operand = x.clone().requires_grad_()
        y = activated(operand, limits)
        (expected,) = torch.autograd.grad(y, operand, grad) if limits else (grad,)
        found = {}
        for kind in KINDS:
            behind = None if limits is None else y.detach()
            found[kind] = kernels.come_back(library(kind), grad, channel, behind, limits)
            assert torch.equal(found[kind].grad, expected)
            assert found[kind].largest == float(expected.abs().max())
            torch.testing.assert_close(found[kind].sums, expected.double().sum(axes))
        assert all(torch.equal(found[kind].sums, found[""].sums) for kind in KINDS)
    for strange in (float("nan"), inf, -inf):
        grad.view(-1)[-1] = strange
        assert all(kernels.come_back(library(kind), grad, channel).largest == inf for kind in KINDS)


@pytest.mark.parametrize(("window", "size"), WINDOWS, ids=str)
def test_maxima_and_their_gradients_are_torchs(window, size):
    torch.manual_seed(2)
    x = torch.randint(-4, 5, (2, 3, *size)).float().requires_grad_()  # with many that are equal
    expected = F.max_pool2d(x, window.kernel, window.step, window.before)
    grad = torch.randint(-8, 9, tuple(expected.shape)).float()
    (gx,) = torch.autograd.grad(expected, x, grad)
    for kind in KINDS:
        y, taps = kernels.pool(library(kind), x.detach(), window, keep=True)
        assert torch.equal(y, expected)
        assert torch.equal(kernels.unpool(library(kind), grad, taps, x.shape, window), gx)
        assert torch.equal(kernels.pool(library(kind), x.detach(), window, keep=False)[0], expected)


def test_what_is_not_for_the_library_is_left_to_torch():
    lib, x, window = library(""), torch.randn(2, 3, 4, 6), Window((2, 2), (2, 2), (0, 0))
    for other in (x.double(), x.half(), x.transpose(2, 3), x[:, :, ::2], x[:0], torch.randn(3)):
        assert kernels.normalise(lib, other, None, None, None, 0.1, 1e-5) is None
        assert kernels.pool(lib, other, window, keep=True) is None
        assert kernels.affine(lib, other, torch.ones(3), torch.ones(3)) is None
        assert not kernels.finish(lib, other, 0, None, (0.0, inf))
        assert kernels.come_back(lib, other, 0) is None
    assert kernels.normalise(lib, x, torch.ones(4), None, None, 0.1, 1e-5) is None
    assert kernels.normalise(lib, x, torch.ones(3).double(), None, None, 0.1, 1e-5) is None
    assert kernels.normalise(lib, torch.randn(1, 3), None, None, None, 0.1, 1e-5) is None
    assert kernels.affine(lib, x, torch.ones(4), torch.ones(3)) is None
    assert not kernels.finish(lib, x, 1, torch.ones(4), None)
    assert not kernels.finish(lib, x, 1, torch.ones(3).double(), None)
    for other in (torch.ones(4), torch.ones(3).double(), torch.ones(1, 3), torch.ones(6)[::2]):
        assert not kernels.finish(lib, x, 1, None, None, Affine(torch.ones(3), other))
        assert not kernels.finish(lib, x, 1, None, None, Affine(other, torch.ones(3)))
        for place in range(4):
            given = [other if each == place else torch.ones(3) for each in range(4)]
            assert kernels.by_running(lib, *given, 1e-5) is None
    assert kernels.by_running(lib, *[torch.ones(0)] * 4, 1e-5) is None
    assert kernels.come_back(lib, x, 1, x[:1], (0.0, inf)) is None
    for window in (Window((16, 16), (1, 1), (0, 0)), Window((5, 5), (1, 1), (0, 0)), Window((1, 1), (1, 1), (1, 0))):
        assert kernels.pool(lib, x, window, keep=True) is None
    _, by = kernels.normalise(lib, x, None, None, None, 0.1, 1e-5)
    assert kernels.derive(lib, x, x[:1], by, None) is None
    assert kernels.derive(lib, x, x, by, (0.0, inf), x[:1]) is None
    for other in (x[:1], x.double(), x.transpose(2, 3).contiguous().transpose(2, 3)):
        assert kernels.normalise(lib, x, None, None, None, 0.1, 1e-5, None, other) is None
        assert kernels.affine(lib, x, torch.ones(3), torch.ones(3), None, other) is None
    assert kernels.derive(lib, x, x.double(), by, None) is None


def test_what_is_handed_over_is_laid_out_as_in_the_c_file():
    bare = re.sub(r"/\*.*?\*/", "", Path(kernels.__file__).with_name("layers.c").read_text(), flags=re.DOTALL)
    kinds = {ctypes.c_double: "double", ctypes.c_float: "float", ctypes.c_int64: "int64_t"}
    for name in ("normalisation", "derivation", "pooling", "finishing", "returning"):
        (body,) = re.findall(r"typedef struct \{([^}]*)\} " + name + ";", bare)
        fields = []
        for line in filter(str.strip, body.split(";")):
            kind, names = re.match(r"\s*(?:const )?(\w+) (.*)", line, re.DOTALL).groups()
            fields += [(each.strip(" *\n"), "pointer" if "*" in each else kind) for each in names.split(",")]
        structure = getattr(kernels, "_" + name.capitalize())
        assert [(field, kinds.get(kind, "pointer")) for field, kind in structure._fields_] == fields, name
