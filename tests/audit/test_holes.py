"""Candidates are excluded by float32 noise, never the true one; our noise excludes none."""

import pytest
import torch

from darknight.audit.attacks.holes import float32_trial, grid_trial
from darknight.audit.holes import float32_noise_explains, grid_noise_explains
from darknight.coding import Real, Scheme
from darknight.data import read_dataset
from darknight.randomness import Randomness, grid_gaussian

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images():
    return read_dataset("digits", seed=0).train_x[:48]


@pytest.fixture(scope="module")
def candidates(images):
    """(share, candidate, *image), the true one first"""
    return torch.stack([images[:8].roll(-turn, dims=0) for turn in range(8)])


def test_float32_noise_excludes_wrong_images_and_never_the_true_one(images, candidates):
    trial = float32_trial(images[:8], candidates, seed=0)
    assert trial.truth_excluded == 0
    assert trial.tried == 56
    assert trial.excluded > 50


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(inputs=4, colluders=1, arithmetic=Real(2e4)),
        Scheme(inputs=3, colluders=1, arithmetic=Real(1.5e3, dtype=torch.float32), training=False),
    ],
)
def test_our_noise_excludes_nothing(images, candidates, scheme):
    trial = grid_trial(images[:8], candidates, scheme)
    assert trial.excluded == trial.truth_excluded == 0


@pytest.mark.parametrize("std", [3.0, 2.0**29 + 1, 2e4 * 2**21])
def test_what_our_generator_makes_is_said_to_be_possible(std):
    noise = grid_gaussian(Randomness.from_operating_system().fresh(), (20_000,), std)
    assert bool(grid_noise_explains(noise, std).all())


def test_what_our_generator_cannot_make_is_not():
    """Beyond the tail, and beside a mean that is not there."""
    assert not bool(grid_noise_explains(torch.tensor([9 * 1000, -9 * 1000]), 1000.0).any())
    assert not bool(grid_noise_explains(torch.tensor([7000]), 1000.0, mean=-2000.0).any())
    assert bool(grid_noise_explains(torch.tensor([-7000]), 1000.0, mean=-2000.0).all())


def test_float32_noise_explains_what_it_made():
    generator = torch.Generator().manual_seed(0)
    x, std = torch.randn(50_000, generator=generator), 2e4
    share = x + std * torch.randn(50_000, generator=generator)
    assert bool(float32_noise_explains(share, x, std).all())
    assert 0.02 < float((~float32_noise_explains(share, x.roll(1), std)).double().mean()) < 0.5
