"""What each network costs, against what is published and against the networks themselves."""

import dataclasses
import math

import pytest
import torch

from darknight.errors import UsageError
from darknight.models import MODELS, build_model, describe
from models.meta import CIFAR, IMAGENET, bilinear

# Parameters, multiplications and convolutions with linear layers at 224x224 with 1000 classes, as published:
# torchvision's table of weights (GFLOPS there are multiplications), and for MobileNetV1 table 8 of its paper.
PUBLISHED = {
    "vgg16": (138_357_544, 15.47e9, 16),
    "vgg16-bn": (138_365_992, 15.47e9, 16),
    "resnet18": (11_689_512, 1.814e9, 18 + 3),  # layers of the name, and the convolutions of three shortcuts
    "resnet50": (25_557_032, 4.089e9, 50 + 4),
    "resnet152": (60_192_808, 11.514e9, 152 + 4),
    "mobilenet-v1": (4_231_976, 0.569e9, 28),
    "mobilenet-v2": (3_504_872, 0.301e9, 53),
}
SMALL = ["vgg-small", "resnet-small", "mobilenet-small"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_networks_cost_what_is_published(name):
    found = describe(name, IMAGENET, 1000)
    parameters, macs, layers = PUBLISHED[name]
    assert (found.name, found.form, found.parameters, found.bilinear_layers) == (name, "ImageNet", parameters, layers)
    assert found.macs == pytest.approx(macs, rel=1e-3)


# The usual networks for CIFAR-10, as counted by others.
@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11_173_962), ("vgg16-bn", 14_728_266)])
def test_the_form_for_small_images_is_the_usual_one(name, parameters):
    found = describe(name, CIFAR, 10)
    assert (found.form, found.parameters) == ("CIFAR", parameters)


@pytest.mark.parametrize("name", SMALL)
def test_networks_for_slow_machines_are_small(name):
    found = describe(name, CIFAR, 10)
    assert 1e6 < found.macs <= 40e6
    assert found.parameters < 1e6


def test_multiplications_are_counted_layer_by_layer():
    """By hand: 3x3 convolutions 1-16-32 on 8x8, 32-64 on 4x4, and the linear layer. Grouped ones: see MobileNets."""
    by_hand = (9 * 1 * 16 + 9 * 16 * 32) * 64 + 9 * 32 * 64 * 16 + 64 * 2 * 2 * 10
    assert describe("small-cnn", (1, 8, 8), 10).macs == by_hand == 601_600
    assert describe("mlp", (3, 8, 8), 10).macs == 3 * 64 * 128 + 128 * 64 + 64 * 10


@pytest.mark.parametrize("name", [*SMALL, "small-cnn", "mlp"])
def test_the_description_is_that_of_the_model_that_is_built(name):
    shape = (2, 12, 9)
    found, model = describe(name, shape, 5), build_model(name, shape=shape, classes=5, seed=0)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.bilinear_layers == len(bilinear(model))
    assert (found.shape, found.classes, found.smallest) == (shape, 5, MODELS[name].smallest)


def test_describing_takes_no_memory_and_no_random_numbers():
    """65,536 pixels a side: the images of the first layer alone would take a terabyte."""
    state = torch.get_rng_state()
    found = describe("vgg16", (3, 65536, 65536), 1000)
    assert torch.equal(state, torch.get_rng_state())
    assert found.macs > 1e15
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.macs = 0


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_sizes_can_still_be_counted(name):
    found = describe(name, (1 << 16, 1 << 16, 1 << 16), 1 << 24)
    assert math.log2(found.macs) < 100


def test_bad_questions_are_refused():
    with pytest.raises(UsageError, match="unknown model 'resnet'"):
        describe("resnet", CIFAR, 10)
    with pytest.raises(UsageError, match="vgg16 needs 32x32 or more"):
        describe("vgg16", (1, 28, 28), 10)
