"""The precision that a layer call is promised: field, real float64, and the paper's float32."""

import pytest
import torch

import darknight as dk
from coding.layer import cosine, plain, protected, relative_error
from darknight.ops import BilinearOp, Conv, Linear
from darknight.randomness import Randomness

CONV = Conv.make((3, 3), padding=1)
# Channels and kernel as stated, the image small: precision depends on the contraction, not on how often it is done.
LAYERS: dict[str, tuple[BilinearOp, tuple[int, ...], tuple[int, ...]]] = {
    "conv 64": (CONV, (16, 64, 14, 14), (64, 64, 3, 3)),
    "conv 512": (CONV, (16, 512, 7, 7), (512, 512, 3, 3)),
    "linear 4096": (Linear(), (16, 4096), (4096, 4096)),
}


@pytest.fixture(scope="module", params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    op, x_shape, w_shape = LAYERS[request.param]
    x, w = torch.randn(x_shape), torch.randn(w_shape)
    delta = torch.randn(op.output_shape(x_shape, w_shape))
    return op, x, w, delta


def test_the_field_is_within_two_to_the_minus_seven(layer):
    op, x, w, delta = layer
    found = protected(dk.Scheme(inputs=4, colluders=1), op, x, w, delta, Randomness.from_operating_system())
    wanted = plain(op, x.double(), w.double(), delta.double())
    assert relative_error(found.y, wanted.y) <= 2**-7
    assert cosine(found.gx, wanted.gx) >= 0.999
    assert cosine(found.gw, wanted.gw) >= 0.999


def test_real_float64_is_within_ten_to_the_minus_eight(layer):
    op, x, w, delta = layer
    scheme = dk.Scheme(inputs=4, colluders=1, arithmetic=dk.Real(2e4))
    found = protected(scheme, op, x, w, delta, Randomness.from_operating_system())
    wanted = plain(op, x.double(), w.double(), delta.double())
    assert relative_error(found.y, wanted.y) <= 1e-8
    assert cosine(found.gx, wanted.gx) >= 0.999
    assert cosine(found.gw, wanted.gw) >= 0.999


def test_the_papers_setting_is_within_two_percent(layer):
    op, x, w, delta = layer
    x = x / x.abs().max()
    found = protected(dk.Scheme.paper(), op, x, w, delta, Randomness.from_operating_system(), bounds=1.0)
    wanted = plain(op, x.double(), w.double(), delta.double())
    assert relative_error(found.y, wanted.y) <= 0.02
    assert cosine(found.gx, wanted.gx) >= 0.999
    assert cosine(found.gw, wanted.gw) >= 0.999
