"""Depthwise convolutions that stay in the enclave: the same training with our kernel and with torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import darknight as dk
from darknight.kernels import compiled_depthwise
from darknight.nn import depthwise
from darknight.ops.place import DEPTHWISE
from nn.at_home import assert_close, assert_trained_alike, gradients, trained
from nn.three_ways import SCHEME

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiled_depthwise.chosen() is None, reason="nothing was compiled"),
]


class Separable(nn.Module):
    """Depthwise convolutions as people write them: a module, a function, with a bias and without."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Conv2d(3, 6, 1)
        self.first = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
        self.second = nn.Conv2d(6, 6, (5, 3), stride=2, padding=(2, 1), groups=6)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 1, 3, 3) / 3), nn.Parameter(torch.zeros(6))
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(self.widen(x)), inplace=True)))
        x = F.conv2d(x, self.weight, self.bias, padding=(1, 1), groups=6)
        return self.head(F.relu(self.norm(x), inplace=True).mean((2, 3)))


def kernels_off(patch) -> None:
    patch.setattr(compiled_depthwise, "chosen", lambda: None)


class Spy:
    """How often the kernel was taken for a product that is derived."""

    def __init__(self, monkeypatch) -> None:
        self.calls, function = [], depthwise._Convolved

        class Noted:
            @staticmethod
            def apply(*arguments):
                self.calls.append(arguments[3])
                return function.apply(*arguments)

        monkeypatch.setattr(depthwise, "_Convolved", Noted)


def trained_with(kernels: bool, monkeypatch):
    with monkeypatch.context() as patch:
        if not kernels:
            kernels_off(patch)
        return trained(Separable, (6, 3, 12, 17))


def test_training_with_our_kernel_is_training_with_torchs_within_rounding(monkeypatch):
    spy = Spy(monkeypatch)
    (ours, report), (torchs, reference) = (trained_with(kernels, monkeypatch) for kernels in (True, False))
    assert len(spy.calls) == 3 * 3  # three layers, three steps, with kernels; and none without
    assert_trained_alike(ours, torchs)
    assert [row for row in report.enclave if row.why == DEPTHWISE]
    assert str(report) == str(reference)  # counted alike, whoever computes


IMAGES = (3, 4, 13, 14)
MODELS = {
    "3x3": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "5x5, in halves": lambda: nn.Conv2d(4, 4, 5, stride=2, padding=2, groups=4, bias=False),
    "a weight that is fixed": lambda: nn.Conv2d(4, 4, 3, groups=4).requires_grad_(False),
}


@pytest.mark.parametrize("model_of", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("again", [False, True], ids=["gradients", "gradients of gradients"])
def test_gradients_are_torchs(model_of, again, monkeypatch):
    spy = Spy(monkeypatch)
    assert_close(*(gradients(model_of, IMAGES, protected, again) for protected in (True, False)))
    assert len(spy.calls) == 1


def test_a_gradient_in_another_layout_is_taken(monkeypatch):
    def look(y):
        return y.permute(0, 2, 3, 1).contiguous()

    spy = Spy(monkeypatch)
    model_of = MODELS["3x3"]
    assert_close(*(gradients(model_of, IMAGES, protected, look=look) for protected in (True, False)))
    assert len(spy.calls) == 1


OTHERS = {
    "padding in words": lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4),
    "padded with what is there": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", groups=4),
    "dilated": lambda: nn.Conv2d(4, 4, 3, dilation=2, groups=4),
    "two outputs of each channel": lambda: nn.Conv2d(4, 8, 3, groups=4),
    "two channels in a group": lambda: nn.Conv2d(4, 4, 3, groups=2),
    "a step of three": lambda: nn.Conv2d(4, 4, 3, stride=3, groups=4),
    "a small image": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4),
    "channels last": lambda: nn.Sequential(Last(), nn.Conv2d(4, 4, 3, groups=4)),
    "doubles": lambda: nn.Sequential(Doubled(), nn.Conv2d(4, 4, 3, groups=4).double()),
}


class Last(nn.Module):
    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last)


class Doubled(nn.Module):
    def forward(self, x):
        return x.double()


@pytest.mark.parametrize("model_of", OTHERS.values(), ids=OTHERS)
def test_what_the_kernel_is_not_made_for_is_computed_all_the_same(model_of, monkeypatch):
    spy = Spy(monkeypatch)
    where = {"where": lambda name, module: False}
    torch.manual_seed(4)
    model, x = model_of(), torch.randn(3, 4, 9, 14)
    plain = model(x)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, **where)
        # With "reflect" torch pads by itself, and what is left is for the kernel.
        torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-5)
    assert len(spy.calls) == (getattr(model, "padding_mode", "zeros") == "reflect")


def test_under_autocast_it_is_torchs(monkeypatch):
    spy = Spy(monkeypatch)
    model = MODELS["3x3"]()
    with dk.Runtime(SCHEME, None) as runtime, torch.autocast("cpu", dtype=torch.bfloat16):
        dk.protect_(model, runtime)
        assert model(torch.randn(2, 4, 5, 6)).dtype == torch.bfloat16
    assert spy.calls == []


def test_what_torch_refuses_is_refused_in_its_words():
    model = MODELS["3x3"]()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        with pytest.raises(RuntimeError, match="expected input"):
            model(torch.randn(2, 5, 6, 7))
