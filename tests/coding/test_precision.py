"""The precision that a layer call is promised: field, real float64, and the paper's float32.

The figures: pytest -s tests/coding/test_precision.py
"""

import pytest
import torch

import darknight as dk
from coding.layer import Passes, cosine, plain, protected, relative_error
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
def layer(request, full):
    torch.manual_seed(0)
    op, x_shape, w_shape = LAYERS[request.param]
    if request.param.startswith("linear") and not full:
        w_shape = (512, *w_shape[1:])  # the sums of the forward pass are as long as they were
    x, w = torch.randn(x_shape), torch.randn(w_shape)
    delta = torch.randn(op.output_shape(x_shape, w_shape))
    return request.param, op, x, w, delta


def judge(name: str, found: Passes, wanted: Passes, largest_error: float) -> None:
    """The forward error is at most the promised one, and both gradients point where they should."""
    error, input_cosine, weight_cosine = (
        relative_error(found.y, wanted.y),
        *(cosine(getattr(found, pass_), getattr(wanted, pass_)) for pass_ in ("gx", "gw")),
    )
    print(f"{name}: forward {error:.2e}, cosine gx {input_cosine:.8f}, cosine gw {weight_cosine:.8f}")
    assert error <= largest_error
    assert min(input_cosine, weight_cosine) >= 0.999


def test_the_field_is_within_two_to_the_minus_seven(layer):
    name, op, x, w, delta = layer
    scheme = dk.Scheme(inputs=4, colluders=1)
    found = protected(scheme, op, x, w, delta, Randomness.from_operating_system())
    judge(f"{name}, field", found, plain(op, x.double(), w.double(), delta.double()), 2**-7)


def test_real_float64_is_within_ten_to_the_minus_eight(layer):
    name, op, x, w, delta = layer
    scheme = dk.Scheme(inputs=4, colluders=1, arithmetic=dk.Real(2e4))
    found = protected(scheme, op, x, w, delta, Randomness.from_operating_system())
    judge(f"{name}, real float64", found, plain(op, x.double(), w.double(), delta.double()), 1e-8)


def test_the_papers_setting_is_within_two_percent(layer):
    name, op, x, w, delta = layer
    x = x / x.abs().max()
    found = protected(dk.Scheme.paper(), op, x, w, delta, Randomness.from_operating_system(), bounds=1.0)
    judge(f"{name}, paper", found, plain(op, x.double(), w.double(), delta.double()), 0.02)
