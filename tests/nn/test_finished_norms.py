"""Batch normalisation finished with its activation, and max pooling as part of a layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import darknight as dk
from darknight.errors import ProtectError
from darknight.kernels import compiled_layers
from darknight.models import VGG, MobileNetV2, ResNet
from darknight.nn.behind import NOTHING, Sequence
from darknight.nn.staying import Staying
from nn.behind import NormSpy, PoolSpy, Spy, assert_same, gradients
from nn.three_ways import SCHEME

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiled_layers.chosen() is None, reason="nothing was compiled"),
]


def normalised_vgg() -> nn.Module:
    return VGG((3, 12, 16), 5, stages=((4, 6), (8,)), batch_norm=True, wide_head=False)


def small_resnet() -> nn.Module:
    return ResNet((3, 12, 16), 5, blocks=(1, 1), width=4, small_images=True)


def small_mobilenet() -> nn.Module:
    return MobileNetV2((3, 12, 16), 5, stages=((1, 4, 1, 1), (2, 4, 2, 1)), stem=4, last=8, dropout=0.0)


# How often: a product is told of its gradient, an activation is left to its normalisation, both were done at once, and
# that with a sum in between.
NORMALISED = {
    "vgg": (normalised_vgg, 3, 0, 3, 0),
    "resnet": (small_resnet, 6, 1, 4, 2),
    "mobilenet": (small_mobilenet, 10, 0, 7, 0),
}


@pytest.mark.parametrize(("model_of", "told", "clipped", "finished", "sums"), NORMALISED.values(), ids=NORMALISED)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_normalisation_is_finished_with_its_activation(
    model_of, told, clipped, finished, sums, training, monkeypatch
):
    """Bit for bit what the same kernels give apart."""
    x = torch.randn(4, 3, 12, 16)
    found = {}
    for apart in (False, True):
        with monkeypatch.context() as patch:
            spy = Spy(patch)
            normed = NormSpy(patch)
            if apart:
                patch.setattr(Sequence, "behind", lambda *_: NOTHING)
                patch.setattr(Sequence, "behind_norm", lambda *_: (None, None))
                patch.setattr(Staying, "multiplied", lambda *_: None)
            found[apart] = gradients(lambda: model_of().train(training), x, monkeypatch=patch)
        if training:
            assert spy.told.count(True) == (0 if apart else 2 * told)
            assert normed.clipped == 2 * (clipped + finished - sums if apart else clipped)
            assert len([limits for limits in normed.finished if limits]) == (0 if apart else 2 * finished)
            assert len([limits for limits in normed.stopped if limits]) == 2 * (clipped + finished - apart * sums)
    assert_same(found[False], found[True])


POOLINGS = {
    "halves": lambda: nn.MaxPool2d(2),
    "overlaps": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "not square": lambda: nn.MaxPool2d((1, 3), stride=(2, 1)),
}


def pooled_by(pool, hook=None) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), pool(), nn.Conv2d(4, 2, 1))
    if hook is not None:
        hook(model)
    return model


@pytest.mark.parametrize("pool", POOLINGS.values(), ids=POOLINGS)
def test_a_pooling_behind_the_activation_is_part_of_the_layer(pool, monkeypatch):
    spy = PoolSpy(monkeypatch)
    x = torch.randn(4, 3, 9, 12)
    ours = gradients(lambda: pooled_by(pool), x, monkeypatch=monkeypatch)
    assert spy.apart == 0
    assert spy.shapes == [(4, 4, 7, 10)] * 2
    assert_same(ours, gradients(lambda: pooled_by(pool), x, kernels=False, monkeypatch=monkeypatch))
    with dk.Runtime(SCHEME, None) as runtime:
        model = pooled_by(pool)
        dk.protect_(model, runtime)
        with torch.no_grad():
            assert torch.equal(model(x), model[3](model[2](model[1](model[0](x)))))
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(ProtectError, match="differentiated twice"):
            grad.sum().backward()


APART = {
    "a hook on the activation": lambda model: model[1].register_forward_hook(
        lambda module, given, y: assert_whole(y, module)
    ),
    "a hook before the pooling": lambda model: model[2].register_forward_pre_hook(
        lambda module, given: assert_whole(given[0], module)
    ),
    "another pooling": lambda model: setattr(
        model[2], "forward", lambda y: F.max_pool2d(assert_whole(y, None) or y, 2)
    ),
}


def assert_whole(y, _) -> None:
    assert y.shape[2:] == (7, 10)
    assert y.min() == 0


@pytest.mark.parametrize("hook", APART.values(), ids=APART)
def test_a_pooling_whose_input_somebody_sees_is_a_function_of_itself(hook, monkeypatch):
    spy = PoolSpy(monkeypatch)
    x = torch.randn(4, 3, 9, 12)
    model_of = lambda: pooled_by(POOLINGS["halves"], hook)  # noqa: E731
    ours = gradients(model_of, x, monkeypatch=monkeypatch)
    assert spy.apart == 2
    assert_same(ours, gradients(model_of, x, kernels=False, monkeypatch=monkeypatch))


def test_a_pooling_that_has_no_kernel_is_torchs(monkeypatch):
    spy = PoolSpy(monkeypatch)
    x = torch.randn(4, 3, 9, 12)
    for pool in (lambda: nn.MaxPool2d(2, ceil_mode=True), lambda: nn.MaxPool2d(2, dilation=2), lambda: nn.AvgPool2d(2)):
        ours, torchs = (
            gradients(lambda: pooled_by(pool), x, kernels=kernels, monkeypatch=monkeypatch)  # noqa: B023
            for kernels in (True, False)
        )
        assert_same(ours, torchs)
    assert spy.shapes == []
