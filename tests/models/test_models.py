"""Every model of the registry, and the ones with something of their own to promise."""

import pytest
import torch
from torch import nn

from darknight.errors import UsageError
from darknight.models import MODELS, SmallCNN, build_model

SHAPES = [(1, 8, 8), (3, 12, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_scores_have_one_column_for_each_class_and_every_parameter_learns(name, shape):
    model = build_model(name, shape=shape, classes=7, seed=0)
    scores = model(torch.randn(5, *shape, generator=torch.Generator().manual_seed(1)))
    assert scores.shape == (5, 7)
    scores.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_depend_on_the_seed_alone(name):
    def weights(seed):
        return torch.cat([p.flatten() for p in build_model(name, shape=(1, 8, 8), classes=10, seed=seed).parameters()])

    state = torch.get_rng_state()
    first = weights(3)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(1)
    assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'resnet'") as caught:
        build_model("resnet", shape=(1, 8, 8), classes=10, seed=0)
    assert all(name in str(caught.value) for name in MODELS)


def test_the_small_network_is_small():
    multiplications = 0

    def count(module, inputs, output):
        nonlocal multiplications
        weight = module.weight
        positions = output.numel() // (output.shape[0] * weight.shape[0])
        multiplications += weight.numel() * positions

    model = SmallCNN().eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    model(torch.zeros(2, 1, 8, 8))
    assert multiplications == 601_600


@pytest.mark.parametrize("shape", [(1, 3, 8), (1, 8, 3)])
def test_images_too_small_to_pool_are_refused(shape):
    with pytest.raises(UsageError, match="4x4"):
        SmallCNN(shape)
