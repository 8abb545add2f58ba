"""Scales beforehand: the estimate keeps coherent sums in range, and depends on nothing but the values."""

import pytest
import torch
from torch import nn

import darknight as dk
from ops.cases import CASES

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = dk.Scheme(inputs=2, colluders=1)


def passes(model, x) -> int:
    """How often passes of one forward and backward were repeated."""
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        model(x.requires_grad_()).sum().backward()
        dk.unprotect_(model)
        return runtime.ledger.overflows.total()


def positive(model):
    for parameter in model.parameters():
        parameter.data.abs_()
    return model


@pytest.mark.parametrize("examples", [2, 16])
def test_one_all_positive_example_before_positive_weights_repeats_nothing(examples):
    torch.manual_seed(0)
    x = torch.randn(examples, 4096)
    x[0].abs_()
    assert passes(positive(nn.Linear(4096, 16)), x) == 0


def test_coherent_images_and_kernels_repeat_nothing():
    torch.manual_seed(0)
    x = torch.rand(4, 64, 12, 12) + 1
    assert passes(positive(nn.Conv2d(64, 8, 5)), x) == 0
    assert passes(positive(nn.ConvTranspose2d(64, 8, 5)), x) == 0


def test_without_the_means_they_would_be_repeated(monkeypatch):
    """The tests above can fail."""
    monkeypatch.setattr("darknight.runtime.sizes.Sizes.of", _without_mean)
    torch.manual_seed(0)
    assert passes(positive(nn.Linear(4096, 16)), torch.rand(2, 4096) + 1) > 0


def _without_mean(sums, length):
    from darknight.runtime.sizes import Sizes

    return Sizes(0.0, float(sums[:, 1].double().mean() / length) ** 0.5, length)


def test_ordinary_values_keep_all_their_bits():
    """Scaling down costs precision, so it is for sums that need it."""
    from darknight.coding.fixed_point import exponent_for, moments
    from darknight.runtime.layer import SentWeights
    from darknight.runtime.scales import input_exponent, weight_sizes

    for case in CASES:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(case.x_shape, generator=generator)
        w = torch.randn(case.w_shape, generator=generator).mul(300).int()
        largest = float(x.abs().max())
        sizes = weight_sizes(case.op, case.w_shape, moments(w.flatten(2) if w.dim() > 2 else w.unsqueeze(2), 0))
        weights = SentWeights("a", 1, case.op, w, 0, sizes=sizes)
        assert input_exponent(dk.Field(), case.op, x, largest, weights, False)[0] == exponent_for(largest, 10)
