"""Layers that stay in the enclave: the same training with kernels of our own and with torch's."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import darknight as dk
from darknight.kernels import compiled_layers
from darknight.nn import pooling, staying
from nn.at_home import assert_trained_alike, trained
from nn.three_ways import SCHEME

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiled_layers.chosen() is None, reason="nothing was compiled"),
]


class Block(nn.Module):
    """Everything that has a kernel, in the ways in which people write it."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, affine=False)
        self.conv3, self.bn3 = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6, track_running_stats=False)
        self.relu, self.relu6 = nn.ReLU(inplace), nn.ReLU6(inplace)
        self.last = nn.Sequential(
            nn.Flatten(), nn.Linear(6 * 3 * 4, 5), nn.BatchNorm1d(5), nn.Hardtanh(inplace=inplace)
        )

    def forward(self, x):
        first = self.relu(self.bn1(self.conv1(x)))
        second = F.max_pool2d(self.relu6(self.bn2(self.conv2(first))), 3, 2, 1)
        third = self.bn3(self.conv3(second))
        return self.last(F.max_pool2d(torch.relu_(third + second), 2))


def trained_with(kernels: bool, model_of, monkeypatch, steps: int = 3):
    with monkeypatch.context() as patch:
        if not kernels:
            patch.setattr(compiled_layers, "chosen", lambda: None)
        return trained(model_of, (6, 3, 12, 16), steps)[0]


@pytest.mark.parametrize("inplace", [True, False], ids=["in place", "apart"])
def test_training_with_our_kernels_is_training_with_torchs_within_rounding(inplace, monkeypatch):
    ours, torchs = (trained_with(kernels, lambda: Block(inplace), monkeypatch) for kernels in (True, False))
    assert_trained_alike(ours, torchs)


class Spy:
    """Which of the functions were taken."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[str] = []
        for room, name in ((staying, "_Normalised"), (staying, "_Clipped"), (pooling, "_Pooled")):
            function = getattr(room, name)
            monkeypatch.setattr(room, name, self._noting(name, function))

    def _noting(self, name, function):
        calls = self.calls

        class Noted:
            @staticmethod
            def apply(*arguments):
                calls.append(name)
                return function.apply(*arguments)

        return Noted


def test_an_activation_in_place_right_behind_is_left_to_the_normalisation(monkeypatch):
    spy = Spy(monkeypatch)
    trained_with(True, lambda: Block(True), monkeypatch, steps=1)
    # bn1-relu, bn2-relu6, pool, bn3 (an addition stands between it and its relu), pool, and a bn that is finished with
    # its hardtanh, because it was known that this comes next.
    block = ["_Normalised", "_Clipped", "_Normalised", "_Clipped", "_Pooled", "_Normalised", "_Pooled"]
    assert spy.calls == [*block, "_Normalised"]
    spy.calls.clear()
    trained_with(True, lambda: Block(False), monkeypatch, steps=1)
    assert "_Clipped" not in spy.calls


class Between(nn.Module):
    """Something else looks at what was normalised before the activation overwrites it."""

    def __init__(self, look) -> None:
        super().__init__()
        self.conv, self.bn, self.relu, self.look = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), look

    def forward(self, x):
        y = self.bn(self.conv(x))
        seen = self.look(y)
        y = self.relu(y)
        return (y if seen is None else y.sum() + seen).mean()


@torch.jit.script
def scripted_sum(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.ones_like(y) * 3.0).sum()


LOOKS = {
    "a sum": lambda y: (y + y).sum(),
    "a hook": lambda y: y.register_hook(lambda grad: grad * 2) and None,
    "a copy": lambda y: y.clone().sum(),
    "a product": lambda y: F.linear(y, torch.ones(2, y.shape[3])).sum(),
}


def assert_close(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    """Within rounding, of the largest of all: a bias before a normalisation has no gradient but that."""
    largest = max(float(each.abs().max()) for each in plain)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("look", [*LOOKS.values(), scripted_sum], ids=[*LOOKS, "a script"])
def test_whoever_looks_in_between_gets_its_gradient(look, monkeypatch):
    spy, grads = Spy(monkeypatch), []
    x = torch.randn(4, 3, 5, 6)
    for protected in (True, False):
        torch.manual_seed(3)
        model = Between(look)
        with dk.Runtime(SCHEME, None) as runtime:
            if protected:
                dk.protect_(model, runtime, where=lambda name, module: False)
            model(x).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    # No mode sees a script.
    assert spy.calls == (["_Normalised", "_Clipped"] if look is scripted_sum else ["_Normalised"])
    assert_close(*grads)


@pytest.mark.parametrize("limits", [(-1.0, math.inf), (0.25, 6.0)], ids=str)
def test_an_activation_in_place_cuts_where_it_says(limits, monkeypatch):
    def model_of():
        return nn.ModuleList([nn.BatchNorm2d(3), nn.Hardtanh(*limits, inplace=True)])

    found = []
    for kernels in (True, False):
        with monkeypatch.context() as patch, dk.Runtime(SCHEME, None) as runtime:
            if not kernels:
                patch.setattr(compiled_layers, "chosen", lambda: None)
            model = InTurn(model_of())
            dk.protect_(model, runtime)
            x = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(2), requires_grad=True)
            y = model(x)
            y.square().sum().backward()
        found.append([y.detach(), x.grad])
    assert found[0][0].min() == limits[0]
    assert_close(*found)


class InTurn(nn.Module):
    """What a Sequential does, in the words of its author."""

    def __init__(self, modules) -> None:
        super().__init__()
        self.inner = modules

    def forward(self, x):
        for module in self.inner:
            x = module(x)
        return x


def test_gradients_of_gradients_are_torchs():
    def penalty(protected: bool) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = nn.Sequential(
            nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.BatchNorm2d(3), nn.ReLU6(True)
        )
        x = torch.randn(3, 3, 6, 8, requires_grad=True)
        with dk.Runtime(SCHEME, None) as runtime:
            if protected:
                dk.protect_(model, runtime)
            (grad,) = torch.autograd.grad(model(x * 1.0).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    assert_close(penalty(True), penalty(False))


def test_what_torch_refuses_is_refused_in_its_words():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(inplace=True))
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(torch.randn(1, 3))


def test_other_layouts_and_types_are_torchs(monkeypatch):
    spy = Spy(monkeypatch)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, dilation=2))
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        model(torch.randn(2, 3, 9, 8, requires_grad=True).to(memory_format=torch.channels_last))
        model.double()(torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.float()(torch.randn(2, 3, 9, 8, requires_grad=True))
    assert spy.calls == []
