"""Images are told apart from any mixture of them; what is not bounded is not."""

import pytest
import torch

from darknight.audit.separation import told_apart
from darknight.data import read_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images():
    """(input, group, feature)"""
    return read_dataset("digits", seed=0).train_x[:96].reshape(3, 32, 64).double()


def likeness(found, truth):
    """(found row, true row): the absolute correlation."""
    return torch.corrcoef(torch.cat([found.flatten(1), truth.flatten(1)]))[: len(found), len(found) :].abs()


@pytest.mark.parametrize("seed", range(4))
def test_any_invertible_mixture_is_undone(images, seed):
    mixing = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mixtures = torch.einsum("ij,jgf->igf", mixing, images)
    assert float(likeness(mixtures, images).amax(dim=0).min()) < 0.99
    table = likeness(told_apart(mixtures), images)
    assert float(table.amax(dim=0).min()) > 0.999999
    assert sorted(table.argmax(dim=0).tolist()) == [0, 1, 2]


def test_one_mixture_is_an_image_already(images):
    assert float(likeness(told_apart(-3 * images[:1]), images[:1]).min()) > 0.999999


def test_gaussian_sources_are_not_told_apart():
    """Nothing distinguishes their rotations: the attack lives on the bounds of images."""
    generator = torch.Generator().manual_seed(1)
    sources = torch.randn(2, 64, 64, generator=generator, dtype=torch.float64)
    mixtures = torch.stack([sources[0] + sources[1], sources[0] - sources[1]])
    assert float(likeness(told_apart(mixtures), sources).max()) < 0.9999
