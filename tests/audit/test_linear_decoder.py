"""The linear decoder rebuilds images from shares without noise, and nothing from sound ones."""

import pytest
import torch

from darknight.audit import linear_decoder
from darknight.audit.linear_decoder import _Ridge, best_linear_decoder, correlation
from darknight.coding import Scheme
from darknight.data import read_dataset
from darknight.errors import DataError

PRIME = Scheme(inputs=4, colluders=1).arithmetic.prime

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images():
    return read_dataset("digits", seed=0).train_x


def quantised(images):
    return ((images * 2**8).round().to(torch.int64) % PRIME).to(torch.int32)


def uniform(images, seed=0):
    return torch.randint(PRIME, images.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def test_shares_without_noise_are_rebuilt(images):
    rebuilt = best_linear_decoder(quantised(images), images, prime=PRIME, seed=0)
    assert rebuilt.correlation > 0.95
    assert rebuilt.images.shape == (len(rebuilt.examples), 1, 8, 8)
    assert correlation(rebuilt.images, images[rebuilt.examples]) > 0.95


def test_shares_that_mix_pixels_without_noise_are_rebuilt(images):
    """A worker is not helped by knowing which pixel is where; any invertible public mixing would do."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randint(-3, 4, (64, 64), generator=generator)
    mixed = (quantised_signed(images) @ mixing).remainder(PRIME).to(torch.int32)
    assert best_linear_decoder(mixed, images, prime=PRIME, seed=0).correlation > 0.95


def quantised_signed(images):
    return (images * 2**8).round().to(torch.int64).flatten(1)


@pytest.mark.parametrize("offset", [0.4, 0.5])
def test_a_constant_mask_instead_of_fresh_noise_is_seen_through(images, offset):
    """One mask used for every image: a constant in the field, which may push values over the wrap."""
    masked = ((quantised(images).to(torch.int64) + int(offset * PRIME)) % PRIME).to(torch.int32)
    assert best_linear_decoder(masked, images, prime=PRIME, seed=0).correlation > 0.95


@pytest.mark.parametrize("seed", range(3))
def test_uniform_shares_tell_nothing(images, seed):
    rebuilt = best_linear_decoder(uniform(images, seed), images, prime=PRIME, seed=seed)
    assert abs(rebuilt.correlation) < 0.05


@pytest.mark.parametrize(("noise", "least", "most"), [(0.1, 0.95, 1.0), (1.0, 0.4, 0.95), (1e4, -0.05, 0.05)])
def test_real_shares_tell_what_their_noise_leaves(images, noise, least, most):
    generator = torch.Generator().manual_seed(2)
    shares = images + noise * torch.randn(images.shape, generator=generator)
    assert least < best_linear_decoder(shares, images, prime=None, seed=0).correlation < most


def test_the_average_image_counts_for_nothing(images):
    """Its plain correlation with every image is high, though it says nothing about any of them."""
    rebuilt = best_linear_decoder(uniform(images), images, prime=PRIME, seed=0)
    assert correlation(rebuilt.images, images[rebuilt.examples]) > 0.5
    assert abs(rebuilt.correlation) < 0.05


def test_what_is_rebuilt_was_not_known(images):
    """The decoder never sees the held-out images: changing them does not change what it makes of their shares."""
    shares = quantised(images)
    first = best_linear_decoder(shares, images, prime=PRIME, seed=0)
    changed = images.clone()
    changed[first.examples] = 0
    again = best_linear_decoder(shares, changed, prime=PRIME, seed=0)
    assert torch.equal(first.examples, again.examples)
    assert torch.equal(first.images, again.images)


def test_constant_shares_are_no_error(images):
    rebuilt = best_linear_decoder(torch.zeros_like(images), images, prime=None, seed=0)
    assert rebuilt.correlation == 0.0


@pytest.mark.parametrize(("shares", "count"), [(10, 9), (4, 4)])
def test_pairs_that_do_not_match_or_are_too_few_are_refused(images, shares, count):
    with pytest.raises(DataError, match=f"{shares} shares for {count} images"):
        best_linear_decoder(uniform(images[:shares]), images[:count], prime=PRIME, seed=0)


@pytest.mark.parametrize(("examples", "features"), [(30, 7), (7, 30)])
def test_it_is_a_ridge_regression(examples, features):
    """Against the normal equations, solved as they are; more features than examples or fewer."""
    generator = torch.Generator().manual_seed(3)
    x, y, new = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((examples, features), (examples, 4), (5, features))
    )
    for ridge in (1e-4, 1.0, 1e4):
        inputs = (x - x.mean(dim=0)) / x.std(dim=0)
        penalty = ridge * examples * torch.eye(features, dtype=torch.float64)
        weights = torch.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ (y - y.mean(dim=0)))
        expected = (new - x.mean(dim=0)) / x.std(dim=0) @ weights + y.mean(dim=0)
        assert torch.allclose(_Ridge(x, y).predict(new, ridge), expected, atol=1e-9)


@pytest.mark.parametrize(("farthest", "sound"), [(linear_decoder._FARTHEST, True), (1e12, False)])
def test_a_rare_wrap_around_does_not_outweigh_everything(monkeypatch, farthest, sound):
    """A residue that was 0 or 1 in all known shares, and is -1 in another, lies at the other end of the field."""
    monkeypatch.setattr(linear_decoder, "_FARTHEST", farthest)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x[:, 0] = (torch.arange(40) % 3 == 0) / PRIME
    y = x[:, 1:] + 0.1 * torch.randn(40, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    new = x.clone()
    new[:2, 0] = (PRIME - 1) / PRIME
    rebuilt = _Ridge(x, y).predict(new, 1e-4)
    assert (correlation(rebuilt, y) > 0.9) is sound
