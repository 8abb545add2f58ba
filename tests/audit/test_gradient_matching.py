"""Small batches come back from the gradient alone; the attack's own gradients are those of autograd."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from darknight.audit.gradient_matching import _gradients, rebuilt_batches
from darknight.audit.intervals import correlation_interval
from darknight.audit.pairing import paired
from darknight.data import read_dataset
from darknight.models import build_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def digits():
    return read_dataset("digits", seed=0)


@pytest.fixture(scope="module")
def model(digits):
    return build_model("mlp", shape=digits.shape, classes=10, seed=0)


def linear(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def gradients(model, images, labels):
    model.zero_grad()
    cross_entropy(model(images), labels).backward()
    return [layer.weight.grad.clone() for layer in linear(model)]


def test_gradients_are_those_of_autograd(digits, model):
    images, labels = digits.train_x[:5], digits.train_y[:5]
    wanted = gradients(model, images, labels)
    weights = [layer.weight.detach() for layer in linear(model)]
    biases = [layer.bias.detach()[None, None] for layer in linear(model)]
    sure = nn.functional.one_hot(labels, 10).float()
    mine = _gradients(images.flatten(1)[None], sure[None], weights, biases)
    for ours, theirs in zip(mine, wanted, strict=True):
        assert torch.allclose(ours[0], theirs, atol=1e-6)


def test_a_batch_of_two_comes_back_and_a_wrong_gradient_gives_something_else(digits, model):
    order = torch.randperm(500, generator=torch.Generator().manual_seed(5))[:6]  # equal labels would be harder
    images, labels, known = digits.train_x[order], digits.train_y[order], digits.train_x[500:].flatten(1)
    weights = [layer.weight.detach() for layer in linear(model)]
    steps = [gradients(model, images[i : i + 2], labels[i : i + 2]) for i in (0, 2, 4)]
    updates = [torch.stack([step[layer] for step in steps]) for layer in range(3)]
    rebuilt = rebuilt_batches(weights, updates, batch=2, known=known, starts=2, steps=300, seed=0)
    mean, truth = known.mean(0), images.flatten(1).view(3, 2, 64)

    def likeness(others):
        pairs = [paired(mine - mean, theirs - mean) for mine, theirs in zip(rebuilt, others, strict=True)]
        return correlation_interval(torch.cat(pairs), (others - mean).flatten(0, 1), seed=0)

    assert likeness(truth).low > 0.9
    assert likeness(truth.roll(1, dims=0)).high < 0.7


def test_pairing_finds_the_order():
    truth = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(paired(2 * truth[order] + 1, truth), 2 * truth + 1)
