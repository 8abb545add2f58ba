"""The network finds what is there to find, and its guess is the mean image where there is nothing."""

import pytest
import torch

from audit.scenes import smooth_images
from darknight.audit.likeness import structural_similarity
from darknight.audit.neural_decoder import trained_decoder
from darknight.coding import Field

PRIME = Field().prime

pytestmark = pytest.mark.usefixtures("one_thread")


def likeness(shares, images, prime, **settings):
    owners = torch.arange(len(images))
    decoded = trained_decoder(shares, images, prime=prime, seed=0, examples=owners, **{"epochs": 12, **settings})
    truth = images[decoded.examples]
    reached, guessed = (
        float(structural_similarity(each, truth, span=1.0).mean())
        for each in (decoded.images, decoded.mean.expand_as(truth))
    )
    return reached, guessed


@pytest.fixture(scope="module")
def images():
    return smooth_images(300, 2, 8, 9)


def residues(images):
    return ((images * 2**9).round().to(torch.int64) % PRIME).to(torch.int32)


def test_shares_without_noise_are_rebuilt(images):
    reached, guessed = likeness(residues(images), images, PRIME)
    assert reached > 0.9 > guessed + 0.1


def test_shares_in_another_form_are_rebuilt(images):
    """A worker whose layer is linear gets a line of numbers; that they were mixed does not matter."""
    mixing = torch.randn(144, 100, generator=torch.Generator().manual_seed(1))
    reached, guessed = likeness(images.flatten(1) @ mixing, images, None, epochs=30)
    assert reached > guessed + 0.2


def test_uniform_shares_give_the_mean_image(images):
    noise = torch.randint(PRIME, images.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    reached, guessed = likeness(noise, images, PRIME)
    assert abs(reached - guessed) < 0.03


def test_what_is_rebuilt_was_not_known_and_the_global_generator_is_left_alone(images):
    owners, shares = torch.arange(len(images)), residues(images)
    before = torch.get_rng_state()
    first = trained_decoder(shares, images, prime=PRIME, seed=0, examples=owners, epochs=2)
    changed = images.clone()
    changed[first.examples] = 0
    again = trained_decoder(shares, changed, prime=PRIME, seed=0, examples=owners, epochs=2)
    assert torch.equal(first.images, again.images)
    assert torch.equal(before, torch.get_rng_state())
