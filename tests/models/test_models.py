"""Every model of the registry, and the ones with something of their own to promise."""

import math

import pytest
import torch
from torch import nn

from darknight.errors import UsageError
from darknight.models import MODELS, SmallCNN, build_model, describe
from models.meta import CIFAR, IMAGENET, on_meta

TWO_FORMS = [name for name, entry in MODELS.items() if len(entry.forms) == 2]
HEAVY = {"vgg16", "resnet50", "resnet152"}  # each has a lighter one of its kind
LIGHTER = [pytest.param(name, marks=[pytest.mark.full] * (name in HEAVY)) for name in MODELS]


def one_step(name, shape, *, batch):
    model = build_model(name, shape=shape, classes=7, seed=0)
    scores = model(torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1)))
    assert scores.shape == (batch, 7)
    scores.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    # Biases in front of a batch norm have no influence, so vectors may well have no gradient.
    assert all(bool(parameter.grad.any()) for parameter in model.parameters() if parameter.dim() > 1)


@pytest.mark.parametrize("name", MODELS)
def test_scores_have_one_column_for_each_class_and_every_weight_learns(name):
    one_step(name, CIFAR, batch=2)


@pytest.mark.parametrize("name", LIGHTER)
def test_the_smallest_image_is_enough(name):
    smallest = MODELS[name].smallest
    one_step(name, (1, smallest, smallest + 1), batch=5)


@pytest.mark.full
@pytest.mark.parametrize("name", TWO_FORMS)
def test_full_size_networks_learn(name):
    one_step(name, (3, 64, 64), batch=2)


@pytest.mark.parametrize("name", LIGHTER)
def test_initial_weights_depend_on_the_seed_alone(name):
    def weights(seed):
        return torch.cat([p.flatten() for p in build_model(name, shape=CIFAR, classes=10, seed=seed).parameters()])

    state = torch.get_rng_state()
    first = weights(3)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(1)
    assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))


@pytest.mark.parametrize("name", TWO_FORMS)
@pytest.mark.parametrize(
    ("sides", "form"), [((64, 64), "ImageNet"), ((63, 64), "CIFAR"), ((64, 63), "CIFAR"), ((32, 32), "CIFAR")]
)
def test_the_shorter_side_decides_the_form(name, sides, form):
    assert MODELS[name].form_for((3, *sides)).name == form


@pytest.mark.parametrize("name", TWO_FORMS)
def test_both_forms_work_where_they_begin_and_are_different(name):
    large, small = describe(name, (3, 64, 64), 10), describe(name, (3, 63, 63), 10)
    assert (large.form, small.form) == ("ImageNet", "CIFAR")
    assert large.macs != small.macs


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].smallest > 1])
def test_images_that_are_too_small_are_refused_with_the_models_that_take_them(name):
    side = MODELS[name].smallest - 1
    with pytest.raises(UsageError, match=f"images of {side}x40; {name} needs {side + 1}x{side + 1} or more") as caught:
        build_model(name, shape=(3, side, 40), classes=10, seed=0)
    assert "mlp" in str(caught.value)
    assert not any(f" {other}," in str(caught.value) for other in MODELS if MODELS[other].smallest > side)


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'resnet'") as caught:
        build_model("resnet", shape=(1, 8, 8), classes=10, seed=0)
    assert all(name in str(caught.value) for name in MODELS)


def test_names_of_torchvision_are_understood():
    assert describe("mobilenet_v2", CIFAR, 10) == describe("mobilenet-v2", CIFAR, 10)


@pytest.mark.parametrize(
    ("shape", "classes", "complaint"),
    [
        ((3, 32), 10, "shape 3x32; needs channels x height x width"),
        ((3, 0, 32), 10, "shape 3x0x32"),
        ((3, 32.0, 32), 10, "shape 3x32.0x32"),
        ((3, 32, 1 << 17), 10, "from 1 to 65536"),
        (CIFAR, 0, "classes 0; needs a whole number"),
        (CIFAR, True, "classes True"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(shape, classes, complaint):
    with pytest.raises(UsageError, match=complaint):
        build_model("mlp", shape=shape, classes=classes, seed=0)


def spread(layer: nn.Module) -> float:
    return float(layer.weight.detach().double().std())


@pytest.mark.parametrize("name", ["vgg16-bn", "resnet18", "mobilenet-v2", "mobilenet-v1"])
def test_initial_weights_are_as_wide_as_those_of_torchvision(name):
    """Kaiming normal by fan-out; heads of ResNet as torch makes them, others normal with 0.01."""
    model = build_model(name, shape=CIFAR, classes=1000, seed=0)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.weight.numel() > 50_000]
    assert len(convolutions) > 5
    for layer in convolutions:
        fan_out = layer.out_channels * math.prod(layer.kernel_size)
        assert spread(layer) == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)
        assert layer.bias is None or not layer.bias.any()
    (head,) = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if name == "resnet18":
        assert spread(head) == pytest.approx(1 / math.sqrt(3 * head.in_features), rel=0.02)
        assert head.bias.any()
    else:
        assert spread(head) == pytest.approx(0.01, rel=0.02)
        assert not head.bias.any()


def test_random_numbers_are_drawn_where_it_is_said():
    """build_model says which forms have a dropout."""
    drawing = {
        (name, form)
        for name in MODELS
        for form, shape in (("large", IMAGENET), ("small", CIFAR))
        if any(isinstance(m, nn.Dropout) and m.p > 0 for m in on_meta(name, shape, 10).modules())
    }
    assert drawing == {
        ("vgg16", "large"),
        ("vgg16-bn", "large"),
        ("mobilenet-v2", "large"),
        ("mobilenet-v2", "small"),
    }


@pytest.mark.parametrize(("name", "draws"), [("mobilenet-v2", True), ("mobilenet-small", False)])
def test_dropout_uses_the_global_generator(name, draws):
    model, images = build_model(name, shape=(3, 8, 8), classes=10, seed=0), torch.ones(4, 3, 8, 8)
    outs, states = [], []
    for _ in range(2):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        outs.append(model(images).detach())
        states.append(torch.equal(before, torch.get_rng_state()))
    assert torch.equal(*outs)
    assert states == [not draws] * 2


@pytest.mark.parametrize("shape", [(1, 3, 8), (1, 8, 3)])
def test_images_too_small_to_pool_are_refused(shape):
    with pytest.raises(UsageError, match="4x4"):
        SmallCNN(shape)
