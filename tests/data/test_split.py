"""The split into training and test examples."""

import pytest
import torch

from darknight.data.split import size_of_test, stratified_split
from darknight.errors import DataError, UsageError


def test_no_example_is_lost_or_in_both_parts():
    labels = torch.tensor([0] * 13 + [1] * 50 + [2] * 4)
    train, test = stratified_split(labels, 10, seed=0)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(67))
    assert torch.bincount(labels[test]).tolist() == [2, 7, 1]


@pytest.mark.parametrize("seed", range(20))
def test_the_size_is_exact_and_every_class_gets_its_share(seed):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 12, (1000,), generator=draw) ** 2 // 11  # uneven, with some classes empty
    wanted = int(torch.randint(1, 999, (), generator=draw))
    train, test = stratified_split(labels, wanted, seed=seed)
    assert (len(test), len(train)) == (wanted, 1000 - wanted)
    quotas = torch.bincount(labels).double() * wanted / 1000
    assert ((torch.bincount(labels[test], minlength=len(quotas)) - quotas).abs() < 1).all()


def test_within_a_class_the_first_of_a_shuffle_are_taken():
    """The same split written as it is said; a split of another version would mix test examples into a training."""
    labels = torch.arange(90) % 7
    order = torch.randperm(90, generator=torch.Generator().manual_seed(3))
    train, test = stratified_split(labels, 21, seed=3)
    expected = {int(at) for label in range(7) for at in [at for at in order if labels[at] == label][:3]}
    assert set(test.tolist()) == expected
    assert test.tolist() == [at for at in order.tolist() if at in expected]
    assert train.tolist() == [at for at in order.tolist() if at not in expected]


def test_seeds_differ():
    labels = torch.arange(100) % 10
    first, again, other = (stratified_split(labels, 20, seed=seed)[1] for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("examples", "share", "size"), [(1797, None, 360), (30, 0.1, 3), (10, 0.25, 3), (2, 0.01, 1), (1000, 0.999, 999)]
)
def test_sizes_are_rounded_up_and_not_by_a_rounding_error(examples, share, size):
    assert size_of_test(examples, share, "toy") == size


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_shares_that_are_none_are_refused(share):
    with pytest.raises(UsageError, match="between 0 and 1"):
        size_of_test(10, share, "toy")


def test_something_must_be_left_for_training():
    with pytest.raises(DataError, match="toy: 1 examples"):
        size_of_test(1, 0.5, "toy")


@pytest.mark.parametrize("together", [1, 7, 64])
def test_how_many_are_looked_at_together_changes_nothing(monkeypatch, together):
    labels = torch.randint(0, 9, (400,), generator=torch.Generator().manual_seed(0)) ** 2 // 5
    expected = stratified_split(labels, 131, seed=6)
    monkeypatch.setattr("darknight.data.split._AT_ONCE", together)
    assert all(torch.equal(*pair) for pair in zip(stratified_split(labels, 131, seed=6), expected, strict=True))
