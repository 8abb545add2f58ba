"""One step of a protected model, with and without kernels, and which of them were taken."""

from math import inf

import torch
from torch import nn

import darknight as dk
from darknight.kernels import compiled_layers
from darknight.models import VGG
from darknight.nn import function, pooling, staying
from darknight.nn.behind import Behind
from nn.three_ways import SCHEME, everything


class Spy:
    """What products were finished with, which of them were told of their gradients, and which activations were left."""

    def __init__(self, monkeypatch) -> None:
        self.finished: list[object] = []
        self.told: list[bool] = []
        self.cut = 0
        real, told, cut = function.Finish, Behind.told, staying._Cut

        def finish(**arguments):
            self.finished.append(arguments["limits"])
            return real(**arguments)

        def asked(behind, grad):
            found = told(behind, grad)
            self.told.append(found is not None)
            return found

        class Cut:
            @staticmethod
            def apply(*arguments):
                self.cut += 1
                return cut.apply(*arguments)

        monkeypatch.setattr(function, "Finish", finish)
        monkeypatch.setattr(Behind, "told", asked)
        monkeypatch.setattr(staying, "_Cut", Cut)


class NormSpy:
    """What normalisations were finished with, and how many activations were left to be cut behind them."""

    def __init__(self, monkeypatch) -> None:
        self.finished: list[object] = []
        self.stopped: list[object] = []
        self.clipped = 0
        normalise, derive, clipped = compiled_layers.normalise, compiled_layers.derive, staying._Clipped

        def noted(*arguments):
            self.finished.append(arguments[7] if len(arguments) > 7 else None)
            return normalise(*arguments)

        class Clipped:
            @staticmethod
            def apply(*arguments):
                self.clipped += 1
                return clipped.apply(*arguments)

        def derived(*arguments):
            self.stopped.append(arguments[4])
            return derive(*arguments)

        monkeypatch.setattr(compiled_layers, "normalise", noted)
        monkeypatch.setattr(compiled_layers, "derive", derived)
        monkeypatch.setattr(staying, "_Clipped", Clipped)


RELU, RELU6 = (0.0, inf), (0.0, 6.0)


def gradients(model_of, x, *, kernels=True, scheme=SCHEME, fleet=None, monkeypatch, use=None):
    """The result and the gradients of one step of a protected model; without kernels it is torch's, in many passes."""
    torch.manual_seed(8)
    model = model_of()
    x = x.clone().requires_grad_()
    with monkeypatch.context() as patch, dk.Runtime(scheme, fleet) as runtime:
        if not kernels:
            patch.setattr(compiled_layers, "chosen", lambda: None)
        dk.protect_(model, runtime, where=everything)
        results = [(use or type(model).__call__)(model, x) for _ in range(2)]
        for result in results:
            result.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"result": results[-1].detach(), "input": x.grad, **grads}


def assert_same(ours, torchs) -> None:
    """Bit for bit; the sums that are gradients of biases, and what further steps make of them, within rounding."""
    assert list(ours) == list(torchs)
    for name, value in ours.items():
        if name.endswith("bias"):
            torch.testing.assert_close(value, torchs[name], rtol=1e-5, atol=1e-5 * float(torchs[name].abs().max()))
        else:
            assert torch.equal(value, torchs[name]), name


def small_vgg() -> nn.Module:
    return VGG((3, 12, 16), 5, stages=((4, 6), (8,)), wide_head=False)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 9), nn.ReLU(inplace=True), nn.Linear(9, 6), nn.ReLU6(inplace=True), nn.Linear(6, 3)
    )


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))


class PoolSpy:
    """How many poolings were functions of themselves, and what was pooled."""

    def __init__(self, monkeypatch) -> None:
        self.apart = 0
        self.shapes: list[tuple[int, ...]] = []
        pool, function = compiled_layers.pool, pooling._Pooled

        def noted(library, x, window, keep):
            self.shapes.append(tuple(x.shape))
            return pool(library, x, window, keep)

        class Pooled:
            @staticmethod
            def apply(*arguments):
                self.apart += 1
                return function.apply(*arguments)

        monkeypatch.setattr(compiled_layers, "pool", noted)
        monkeypatch.setattr(pooling, "_Pooled", Pooled)
