"""What is recorded at a worker belongs to the images it is said to carry, and tells nothing about them."""

import copy

import pytest
import torch

from darknight.audit import best_linear_decoder, record_worker_view
from darknight.coding import Real, Scheme
from darknight.data import read_dataset
from darknight.errors import DataError
from darknight.models import build_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def digits():
    return read_dataset("digits", seed=0)


@pytest.fixture(scope="module")
def model(digits):
    return build_model("small-cnn", shape=digits.shape, classes=10, seed=0)


def test_a_worker_of_the_field_sees_uniform_residues_of_every_image(digits, model):
    scheme = Scheme(inputs=4, colluders=1)
    before = copy.deepcopy(model.state_dict())
    view = record_worker_view(model, digits.train_x[:403], scheme, worker=1)
    assert view.shares.shape == view.images.shape == (400, 1, 8, 8)
    assert view.shares.dtype == torch.int32
    assert {image.numpy().tobytes() for image in view.images} == {
        image.numpy().tobytes() for image in digits.train_x[:400]
    }
    prime = scheme.arithmetic.prime
    assert int(view.shares.min()) >= 0
    assert int(view.shares.max()) < prime
    assert abs(float(view.shares.double().mean()) / prime - 0.5) < 0.01
    assert abs(best_linear_decoder(view.shares, view.images, prime=prime, seed=0).correlation) < 0.1
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_shares_and_images_are_paired_rightly(digits, model):
    """Real noise no larger than the data, which hides little: a wrong pairing would leave nothing to find."""
    scheme = Scheme(inputs=3, colluders=1, arithmetic=Real(noise_std=1.0))
    view = record_worker_view(model, digits.train_x[:600], scheme, worker=2)
    assert best_linear_decoder(view.shares, view.images, prime=None, seed=0).correlation > 0.2


@pytest.mark.parametrize(("images", "worker"), [(8, 4), (8, -1), (3, 0)])
def test_a_worker_without_images_of_its_own_is_refused(digits, model, images, worker):
    with pytest.raises(DataError):
        record_worker_view(model, digits.train_x[:images], Scheme(inputs=4, colluders=1), worker=worker)
