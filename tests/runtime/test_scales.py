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
    from darknight.runtime.scales import input_exponent, survey, weight_sizes

    for case in CASES:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(case.x_shape, generator=generator)
        w = torch.randn(case.w_shape, generator=generator).mul(300).int()
        largest = float(x.abs().max())
        sizes = weight_sizes(case.op, case.w_shape, moments(w.flatten(2) if w.dim() > 2 else w.unsqueeze(2), 0))
        weights = SentWeights("a", 1, case.op, w, 0, sizes=sizes)
        found = survey(case.op, x, 10, counted=True)
        assert input_exponent(dk.Field(), case.op, x, found, weights, False)[0] == exponent_for(largest, 10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_survey_does_not_depend_on_what_was_guessed_or_known(case):
    from darknight.runtime.scales import survey

    x = torch.randn(case.x_shape, generator=torch.Generator().manual_seed(0))
    for values in (x, x.double(), x * 0, x * 2.0**90, x * 2.0**-100):
        expected = survey(case.op, values, 10, counted=True)
        for guess in (None, -120, -90, expected.exponent - 1, expected.exponent, expected.exponent + 1, 12, 120):
            assert survey(case.op, values, 10, counted=True, guess=guess) == expected
        for known in (expected.largest, float("inf")):
            assert survey(case.op, values, 10, counted=True, known=known, guess=3) == expected
        alone = survey(case.op, values, 10, counted=False, guess=expected.exponent)
        assert (alone.largest, alone.exponent) == (expected.largest, expected.exponent)


def test_values_are_read_once_where_they_are_as_large_as_before(monkeypatch):
    from darknight.runtime import scales

    reads = []

    def noting(name):
        does = getattr(scales, name)
        monkeypatch.setattr(scales, name, lambda *arguments: (reads.append(name), does(*arguments))[1])

    for name in ("largest_magnitude", "moments", "surveyed_at"):
        noting(name)
    torch.manual_seed(0)
    model, results = nn.Linear(6, 3), []
    x = torch.randn(4, 6)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        with torch.no_grad():
            for factor, expected in (
                (1.0, ["largest_magnitude", "moments"]),
                (1.0, ["surveyed_at"]),
                (8.0, ["surveyed_at", "moments"]),
                (8.0, ["surveyed_at"]),
                (1.0, ["surveyed_at", "moments"]),
            ):
                results.append(model(x * factor))
                assert reads == expected
                reads.clear()
        with pytest.raises(dk.errors.EncodingError, match="NaN or infinite"):
            model(x / 0)
        dk.unprotect_(model)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[4])
    assert torch.equal(results[2], results[3])
