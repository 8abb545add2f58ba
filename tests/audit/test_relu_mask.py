"""Images come back from the signs of a convolution's units, and only from the right ones."""

import pytest
import torch
from torch import nn

from darknight.audit.intervals import correlation_interval
from darknight.audit.relu_mask import images_behind, read_as_mask
from darknight.data import read_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images():
    return read_dataset("digits", seed=0).train_x[:8, :, :7]  # not square


@pytest.fixture(scope="module")
def layer():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Conv2d(1, 64, kernel_size=3, padding=1)


def likeness(rebuilt, truth):
    rebuilt = rebuilt / rebuilt.flatten(1).norm(dim=1)[:, None, None, None]
    return correlation_interval(rebuilt - rebuilt.mean(0), truth - truth.mean(0), seed=0)


def test_images_come_back_from_the_mask_and_public_weights(images, layer):
    with torch.no_grad():
        on = layer(images) > 0
    rebuilt = images_behind(on, layer.weight.detach(), padding=(1, 1))
    assert rebuilt.shape == images.shape
    assert likeness(rebuilt, images).low > 0.95


def test_a_random_mask_gives_nothing(images, layer):
    on = torch.rand(8, 64, 7, 8, generator=torch.Generator().manual_seed(1)) > 0.5
    assert abs(likeness(images_behind(on, layer.weight.detach(), padding=(1, 1)), images).value) < 0.25


def test_zeros_are_units_that_were_off():
    gradients = torch.tensor([[0.0, 1e-20, -3.0], [2.0, 0.0, 0.0]])
    assert read_as_mask(gradients).tolist() == [[False, True, True], [True, False, False]]


def test_without_zeros_the_half_nearest_to_zero_is_guessed():
    assert read_as_mask(torch.tensor([[5, -1, 2, -9]])).tolist() == [[True, False, False, True]]
