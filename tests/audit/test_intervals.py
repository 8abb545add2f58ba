"""Intervals hold what they promise, and resampling images is wider than resampling their pixels."""

import pytest
import torch

from darknight.audit.intervals import correlation_interval, mean_interval, share_interval

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_the_truth_is_inside_as_often_as_it_says(slope, full):
    """Of 95 % intervals about 95 in 100; fewer than 85 or all of many would be another kind of interval."""
    trials, inside = (400 if full else 120), 0
    truth = slope / (1 + slope**2) ** 0.5
    for seed in range(trials):
        left, noise = drawn(2 * seed, 60, 5), drawn(2 * seed + 1, 60, 5)
        found = correlation_interval(left, slope * left + noise, seed=seed)
        inside += found.low <= truth <= found.high
    assert 0.87 < inside / trials < 0.995


def test_values_are_the_usual_ones():
    left, right = drawn(0, 30, 7), drawn(1, 30, 7)
    both = torch.stack([left.flatten(), (left + right).flatten()])
    assert correlation_interval(left, left + right, seed=0).value == pytest.approx(float(torch.corrcoef(both)[0, 1]))
    found = mean_interval(left[:, 0], seed=0)
    assert found.value == pytest.approx(float(left[:, 0].mean()))
    assert found.low < found.value < found.high


def test_a_perfect_copy_and_a_constant():
    left = drawn(0, 20, 3)
    copy = correlation_interval(left, 5 - 2 * left, seed=0)
    assert copy.low == pytest.approx(-1)
    assert copy.high == pytest.approx(-1)
    constant = correlation_interval(left, torch.ones_like(left), seed=0)
    assert (constant.value, constant.low, constant.high) == (0, 0, 0)


def test_what_belongs_together_is_resampled_together():
    """Ten copies of the same twenty rows are no more evidence than the twenty rows."""
    left, right = drawn(0, 20, 1), drawn(1, 20, 1)
    owners = torch.arange(20).repeat(10)
    once = correlation_interval(left, right, seed=0)
    clustered = correlation_interval(left.repeat(10, 1), right.repeat(10, 1), clusters=owners, seed=0)
    careless = correlation_interval(left.repeat(10, 1), right.repeat(10, 1), seed=0)
    assert clustered.low == pytest.approx(once.low)
    assert clustered.high == pytest.approx(once.high)
    assert careless.high - careless.low < 0.5 * (once.high - once.low)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(0, 100, 0.0, 0.0370), (100, 100, 0.9630, 1.0), (50, 100, 0.4038, 0.5962), (1, 10, 0.0179, 0.4042)],
)
def test_counts_have_wilsons_interval(hits, trials, low, high):
    found = share_interval(hits, trials)
    assert found.value == hits / trials
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)
