"""1x1 convolutions that stay in the enclave: the same training as products of matrices and as torch's convolutions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import darknight as dk
from darknight.nn import one_by_one
from nn.at_home import Changed, assert_close, assert_trained_alike, gradients, nothing, trained
from nn.three_ways import SCHEME

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE, BATCH = (3, 6, 5, 7), (6, 3, 8, 8)


class Block(nn.Module):
    """1x1 convolutions as people write them: a module, a function, with a bias and without; one is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = nn.Conv2d(3, 6, 3, padding=1)
        self.wide = nn.Conv2d(6, 18, 1, bias=False)
        self.norm = nn.BatchNorm2d(18)
        self.narrow = nn.Conv2d(18, 4, 1)
        self.weight = nn.Parameter(torch.randn(5, 4, 1, 1) / 2)

    def forward(self, x):
        x = F.relu6(self.norm(self.wide(F.relu(self.sent(x)))), inplace=True)
        x = F.relu(self.narrow(x), inplace=True)
        return F.conv2d(x, self.weight, padding=0).mean((2, 3))


class Spy:
    """The shapes of inputs that were multiplied as matrices."""

    def __init__(self, monkeypatch, smallest: int = 1) -> None:
        self.seen = []
        product = one_by_one._product

        def noted(x, weight, bias):
            self.seen.append(tuple(x.shape))
            return product(x, weight, bias)

        monkeypatch.setattr(one_by_one, "_product", noted)
        monkeypatch.setattr(one_by_one, "_SMALLEST", smallest)


def only_sent(name: str, module: nn.Module) -> bool:
    return name == "sent"


def test_training_by_products_of_matrices_is_training_by_convolutions_within_rounding(monkeypatch):
    with monkeypatch.context() as patch:
        spy = Spy(patch)
        ours, report = trained(Block, BATCH, where=only_sent)
        assert len(spy.seen) == 3 * 4  # three layers, three steps and scores
    torchs, reference = trained(Block, BATCH, where=only_sent)  # images of 8x8 are torch's
    assert_trained_alike(ours, torchs)
    assert str(report) == str(reference)  # counted alike, whoever computes


def assert_torchs(model_of, **options) -> None:
    """Results, their layout, and gradients."""
    ours, plain = (gradients(model_of, SHAPE, protected, where=nothing, **options) for protected in (True, False))
    assert_close(ours, plain)
    assert ours[0].stride() == plain[0].stride()


def frozen(name: str):
    model = nn.Conv2d(6, 9, 1)
    getattr(model, name).requires_grad_(False)
    return model


MODELS = {
    "with a bias": lambda: nn.Conv2d(6, 9, 1),
    "without": lambda: nn.Conv2d(6, 9, 1, bias=False),
    "a weight that is fixed": lambda: frozen("weight"),
    "a bias that is fixed": lambda: frozen("bias"),
    "all of it fixed": lambda: nn.Conv2d(6, 9, 1).requires_grad_(False),
    "a dilation, which means nothing": lambda: nn.Conv2d(6, 9, 1, dilation=2),
    "one output": lambda: nn.Conv2d(6, 1, 1),
}


@pytest.mark.parametrize("again", [False, True], ids=["gradients", "gradients of gradients"])
@pytest.mark.parametrize("model_of", MODELS.values(), ids=MODELS)
def test_results_gradients_and_layouts_are_torchs(model_of, again, monkeypatch):
    spy = Spy(monkeypatch)
    assert_torchs(model_of, again=again)
    assert spy.seen == [SHAPE]


def test_a_gradient_in_another_layout_is_taken(monkeypatch):
    spy = Spy(monkeypatch)

    def look(y):
        return y.to(memory_format=torch.channels_last)

    model_of = MODELS["with a bias"]
    assert_torchs(model_of, look=look)
    assert spy.seen == [SHAPE]


def test_an_activation_in_place_behind_it_is_torchs(monkeypatch):
    spy = Spy(monkeypatch)

    def model_of():
        return nn.Sequential(nn.Conv2d(6, 9, 1), nn.ReLU(inplace=True))

    assert_torchs(model_of)
    assert spy.seen == [SHAPE]


OTHERS = {
    "a larger kernel": lambda: nn.Conv2d(6, 9, (1, 3)),
    "a step": lambda: nn.Conv2d(6, 9, 1, stride=(1, 2)),
    "padding": lambda: nn.Conv2d(6, 9, 1, padding=1),
    "padding by a word": lambda: nn.Conv2d(6, 9, 1, padding="same"),
    "groups": lambda: nn.Conv2d(6, 9, 1, groups=3),
    "doubles": lambda: Changed(lambda x: x.double(), nn.Conv2d(6, 9, 1).double()),
    "channels last": lambda: Changed(lambda x: x.to(memory_format=torch.channels_last), nn.Conv2d(6, 9, 1)),
    "one channel, in any layout": lambda: Changed(lambda x: x[:, :1].contiguous(), nn.Conv2d(1, 9, 1)),
    "no examples": lambda: Changed(lambda x: x[:0], nn.Conv2d(6, 9, 1)),
    "one example, without its axis": lambda: Changed(lambda x: x[0], nn.Conv2d(6, 9, 1)),
}


@pytest.mark.parametrize("model_of", OTHERS.values(), ids=OTHERS)
def test_what_it_is_not_made_for_is_computed_all_the_same(model_of, monkeypatch):
    spy = Spy(monkeypatch)
    assert_torchs(model_of)
    assert spy.seen == []


def test_smaller_images_are_torchs(monkeypatch):
    spy = Spy(monkeypatch, SHAPE[2] * SHAPE[3] + 1)
    gradients(MODELS["with a bias"], SHAPE, True, where=nothing)
    assert spy.seen == []


def test_many_channels_on_both_sides_are_torchs(monkeypatch):
    spy = Spy(monkeypatch)
    monkeypatch.setattr(one_by_one, "_MOST", 6)
    gradients(lambda: nn.Conv2d(6, 9, 1), SHAPE, True, where=nothing)
    assert spy.seen == [SHAPE]
    monkeypatch.setattr(one_by_one, "_MOST", 5)
    gradients(lambda: nn.Conv2d(6, 9, 1), SHAPE, True, where=nothing)
    assert spy.seen == [SHAPE]


def test_under_autocast_it_is_torchs(monkeypatch):
    spy = Spy(monkeypatch)
    model = nn.Conv2d(6, 9, 1)
    with dk.Runtime(SCHEME, None) as runtime, torch.autocast("cpu", dtype=torch.bfloat16):
        dk.protect_(model, runtime, where=nothing)
        assert model(torch.randn(SHAPE)).dtype == torch.bfloat16
    assert spy.seen == []


def test_a_weight_that_was_changed_before_its_gradient_is_noticed_as_by_torch(monkeypatch):
    Spy(monkeypatch)
    model, x = nn.Conv2d(6, 9, 1), torch.randn(SHAPE, requires_grad=True)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, where=nothing)
        y = model(x)
        with torch.no_grad():
            model.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_what_torch_refuses_is_refused_in_its_words(monkeypatch):
    Spy(monkeypatch)
    model = nn.Conv2d(6, 9, 1)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, where=nothing)
        with pytest.raises(RuntimeError, match="to have 6 channels"):
            model(torch.randn(3, 5, 5, 7))


def test_what_is_more_than_its_values_is_torchs(monkeypatch):
    """Forward-mode derivatives, and functions that torch.func transforms."""
    spy = Spy(monkeypatch)
    layer = nn.Conv2d(6, 9, 1).requires_grad_(False)
    x, along = torch.randn(SHAPE), torch.randn(SHAPE)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(layer, runtime, where=nothing)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, along))).tangent
        mapped = torch.func.vmap(layer)(x)
        assert spy.seen == []
        layer(x)
        assert spy.seen == [SHAPE]
        dk.unprotect_(layer)
    assert torch.allclose(tangent, F.conv2d(along, layer.weight), atol=1e-5)
    assert torch.allclose(mapped, layer(x), atol=1e-5)
