"""Forwards of somebody's own: layers are finished with what gets their results, and give what they gave before."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import darknight as dk
from darknight.kernels import compiled_layers
from darknight.models.mobilenet import _InvertedResidual
from darknight.models.resnet import BasicBlock, Bottleneck
from darknight.nn import depthwise, protect
from fleet.threads import thread_fleet
from nn.behind import RELU, RELU6, PoolSpy, Spy, assert_same, gradients
from nn.blocks import Added, Basic, Digits, Inverted
from nn.three_ways import SCHEME

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiled_layers.chosen() is None, reason="nothing was compiled"),
]


class SumSpy:
    """Which normalisations added something, and what they were cut to: (added, limits)."""

    def __init__(self, monkeypatch) -> None:
        self.finished: list[tuple[bool, object]] = []
        normalise, affine = compiled_layers.normalise, compiled_layers.affine

        def noted(library, x, weight, bias, running, momentum, epsilon, limits=None, added=None):
            self.finished.append((added is not None, limits))
            return normalise(library, x, weight, bias, running, momentum, epsilon, limits, added)

        def scaled(library, x, scale, shift, limits=None, added=None):
            self.finished.append((added is not None, limits))
            return affine(library, x, scale, shift, limits, added)

        monkeypatch.setattr(compiled_layers, "normalise", noted)
        monkeypatch.setattr(compiled_layers, "affine", scaled)


def unread(patch) -> None:
    """Nobody reads a forward."""
    patch.setattr(protect, "read", lambda function: None)


def downsampled(block, outputs, stride=2):
    return nn.Sequential(nn.Conv2d(6, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


PLAIN, CUT, SUM, CUT_SUM = (False, None), (False, RELU), (True, None), (True, RELU)
BLOCKS = {
    "basic": (lambda: Basic(), [CUT, CUT_SUM]),
    "basic, not in place": (lambda: Basic(inplace=False), [CUT, CUT_SUM]),
    "basic, downsampled": (lambda: Basic(6, 8, 2), [CUT, PLAIN, CUT_SUM]),
    "our basic": (lambda: BasicBlock(6, 6, 1, None), [CUT, CUT_SUM]),
    "our basic, downsampled": (lambda: BasicBlock(6, 8, 2, downsampled(BasicBlock, 8)), [PLAIN, CUT, CUT_SUM]),
    "bottleneck": (lambda: Bottleneck(16, 4, 1, None), [CUT, CUT, CUT_SUM]),
    "bottleneck, downsampled": (lambda: Bottleneck(6, 2, 2, downsampled(Bottleneck, 8)), [PLAIN, CUT, CUT, CUT_SUM]),
    "inverted": (lambda: Inverted(), [(False, RELU6), SUM]),
    "inverted, other channels": (lambda: Inverted(6, 4), [(False, RELU6), PLAIN]),
    "our inverted": (lambda: _InvertedResidual(6, 6, 2, 1), [(False, RELU6), (False, RELU6), SUM]),
    "our inverted, no shortcut": (lambda: _InvertedResidual(6, 6, 2, 2), [(False, RELU6), (False, RELU6), PLAIN]),
    "two of them": (lambda: nn.Sequential(Basic(), Basic()), [CUT, CUT_SUM] * 2),
}


def shape_of(model):
    return (4, 16 if isinstance(model, Bottleneck) and model.downsample is None else 6, 9, 8)


@pytest.mark.parametrize(("model_of", "finished"), BLOCKS.values(), ids=BLOCKS)
def test_a_block_is_finished_in_few_passes_with_the_same_bits(model_of, finished, monkeypatch):
    x = torch.randn(shape_of(model_of()))
    found = {}
    for reads in (True, False):
        with monkeypatch.context() as patch:
            spy = SumSpy(patch)
            if not reads:
                unread(patch)
            found[reads] = gradients(model_of, x, monkeypatch=patch)
        if reads:
            assert spy.finished == finished * 2
        else:
            assert not any(added for added, _ in spy.finished)
    assert list(found[True]) == list(found[False])
    for name, value in found[True].items():
        assert torch.equal(value, found[False][name]), name


@pytest.mark.parametrize(("model_of", "finished"), BLOCKS.values(), ids=BLOCKS)
def test_with_workers_and_without_kernels(model_of, finished, monkeypatch):
    x = torch.randn(shape_of(model_of()))
    alone = gradients(model_of, x, monkeypatch=monkeypatch, use=weighed)
    with thread_fleet(SCHEME) as fleet:
        assert_same(gradients(model_of, x, fleet=fleet, monkeypatch=monkeypatch, use=weighed), alone)
    torchs = gradients(model_of, x, kernels=False, monkeypatch=monkeypatch, use=weighed)
    assert_close(alone["result"], torchs["result"])  # gradients are rounded by chance, as a scale comes out


def weighed(model, x):
    """Squares of what was normalised have one sum, whatever the weights are: no gradients to compare."""
    y = model(x)
    return y * torch.linspace(0.2, 3, y.numel()).view(y.shape)


def assert_close(first, second) -> None:
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2 * float(second.abs().max()))


@pytest.mark.parametrize(("model_of", "finished"), BLOCKS.values(), ids=BLOCKS)
def test_in_evaluation_nothing_is_derived_that_was_finished(model_of, finished, monkeypatch):
    torch.manual_seed(2)
    model, x = model_of().eval(), torch.randn(shape_of(model_of()))
    plain = copy.deepcopy(model)
    monkeypatch.setattr(depthwise, "_SMALLEST", 1)
    spy = SumSpy(monkeypatch)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        with torch.no_grad():
            ours = model(x)
            assert spy.finished == [each for each in finished if each[0]]  # others are part of their layer
        spy.finished.clear()
        derived = model(x)  # weights are derived: a normalisation by running statistics is torch's
        assert spy.finished == []
        assert derived.requires_grad
        model.requires_grad_(False)
        x.requires_grad_()
        model(x).sum().backward()
        expected = x.grad
    torch.testing.assert_close(ours, derived.detach(), rtol=1e-4, atol=1e-5)
    assert_close(ours, plain(x.detach()).detach())
    assert expected.abs().max() > 0


class Shortcut(nn.Module):
    """A sum whose other side alone is derived."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU()

    def forward(self, x, other):
        return self.relu(self.bn(self.conv(x)) + other)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("of_x", "of_other"), [(True, False), (False, True), (True, True)])
def test_each_side_of_a_sum_gets_its_gradient(training, of_x, of_other, monkeypatch):
    torch.manual_seed(3)
    x, other = torch.randn(4, 6, 5, 3), torch.randn(4, 6, 5, 3)
    found = []
    for reads in (True, False):
        torch.manual_seed(4)
        model = Shortcut().train(training).requires_grad_(False)
        with monkeypatch.context() as patch, dk.Runtime(SCHEME, None) as runtime:
            if not reads:
                unread(patch)
            dk.protect_(model, runtime)
            given = x.clone().requires_grad_(of_x), other.clone().requires_grad_(of_other)
            y = model(*given)
            y.square().sum().backward()
        found.append((y.detach(), given[0].grad, given[1].grad, model.bn.running_var))
    for ours, apart in zip(*found, strict=True):
        assert (ours is None) == (apart is None)
        assert ours is None or torch.equal(ours, apart)
    assert (found[0][1] is not None, found[0][2] is not None) == (of_x, of_other)


def test_functions_of_torch_are_known_too(monkeypatch):
    spy, pools, norms = Spy(monkeypatch), PoolSpy(monkeypatch), SumSpy(monkeypatch)
    x = torch.randn(4, 6, 10, 8)
    ours = gradients(Digits, x, monkeypatch=monkeypatch)
    assert spy.finished == [RELU, RELU, RELU, None] * 2
    assert pools.apart == 0
    assert_same(ours, gradients(Digits, x, kernels=False, monkeypatch=monkeypatch))
    ours = gradients(Added, x, monkeypatch=monkeypatch)
    assert norms.finished == [CUT_SUM, SUM] * 2
    with monkeypatch.context() as patch:
        unread(patch)
        assert_same(ours, gradients(Added, x, monkeypatch=patch))
    model = Added().eval()
    with dk.Runtime(SCHEME, None) as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        norms.finished.clear()
        model(x)
    assert norms.finished == [CUT_SUM, (True, RELU6)]


def test_autograd_says_what_it_said(monkeypatch):
    model, x = nn.Sequential(Basic()), torch.randn(4, 6, 5, 7)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        y = model(x)
        y += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        total = weighed(model, x).sum()
        model.zero_grad()
        total.backward(retain_graph=True)
        grad = model[0].conv1.weight.grad.clone()
        total.backward()
        assert_close(model[0].conv1.weight.grad, 2 * grad)
        with pytest.raises(RuntimeError, match="second time"):
            total.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_block_is_finished_both_times(reentrant, monkeypatch):
    spy, x = SumSpy(monkeypatch), torch.randn(4, 6, 5, 7)
    again = lambda model, x: checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
    ours = gradients(lambda: Basic(6, 8, 2), x, monkeypatch=monkeypatch, use=again)
    assert spy.finished == [CUT, PLAIN, CUT_SUM] * 4
    assert_same(ours, gradients(lambda: Basic(6, 8, 2), x, monkeypatch=monkeypatch))


def test_gradients_of_gradients_by_a_shortcut():
    """A block without protected layers, derived twice."""

    def penalty(model, x, other):
        x, other = x.clone().requires_grad_(), other.clone().requires_grad_()
        grads = torch.autograd.grad(model(x, other).pow(3).sum(), (x, other), create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
        return x.grad, other.grad, model.bn.weight.grad

    class Normal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.relu, self.never = nn.BatchNorm2d(6), nn.ReLU(), nn.Linear(2, 2)

        def forward(self, x, other):
            return self.relu(self.bn(x) + other)

    torch.manual_seed(5)
    given = torch.randn(4, 6, 3, 5), torch.randn(4, 6, 3, 5)
    model = Normal()
    expected = penalty(copy.deepcopy(model), *given)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        found = penalty(model, *given)
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-4 * float(torchs.abs().max()))


def test_a_deep_copy_and_a_loaded_state_are_followed_too(monkeypatch):
    spy, model, x = SumSpy(monkeypatch), Basic(), torch.randn(4, 6, 5, 7)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(x), model(x))
        assert spy.finished == [CUT, CUT_SUM] * 2
        dk.unprotect_(model)
        assert "forward" not in vars(model)


def test_a_normalisation_behind_an_activation_that_was_done_is_cut_again(monkeypatch):
    """ReLU6 and then a ReLU, both in place: what the first one stopped stays stopped."""
    x = torch.randn(4, 6, 5, 7)

    def wide():
        activations = nn.ReLU6(inplace=True), nn.ReLU(inplace=True)
        model = nn.Sequential(nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), *activations)
        nn.init.constant_(model[1].weight, 9.0)
        return model

    ours, torchs = (gradients(wide, x, kernels=kernels, monkeypatch=monkeypatch) for kernels in (True, False))
    for name, value in ours.items():
        assert_close(value, torchs[name])
