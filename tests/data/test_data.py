"""Readers, the split, and what a dataset refuses to be."""

import dataclasses
import sys

import pytest
import torch

from darknight.data import DATASETS, Dataset, read_dataset
from darknight.data.dataset import stratified_split
from darknight.errors import DataError, UsageError


@pytest.fixture(scope="module")
def digits():
    return read_dataset("digits", seed=0)


def test_digits_are_split_one_to_four(digits):
    assert digits.train_x.shape == (1437, 1, 8, 8)
    assert digits.test_x.shape == (360, 1, 8, 8)
    assert digits.shape == (1, 8, 8)
    assert digits.classes == 10


def test_digits_are_normalised_by_their_training_part(digits):
    assert abs(float(digits.train_x.mean())) < 1e-5
    assert abs(float(digits.train_x.std()) - 1) < 1e-5
    assert digits.train_x.dtype == torch.float32


@pytest.mark.parametrize("name", DATASETS)
def test_the_split_depends_on_the_seed_alone(name):
    first, again, other = (read_dataset(name, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.train_x, again.train_x)
    assert torch.equal(first.test_y, again.test_y)
    assert not torch.equal(first.test_y, other.test_y)


def test_no_example_is_lost_or_in_both_parts():
    labels = torch.tensor([0] * 13 + [1] * 50 + [2] * 4)
    train, test = stratified_split(labels, 10, seed=0)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(67))
    assert len(test) == 10
    assert torch.bincount(labels[test]).tolist() == [2, 7, 1]


def test_an_unknown_dataset_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'imagenet'; use one of digits"):
        read_dataset("imagenet", seed=0)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        read_dataset("digits", seed=0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"train_x": torch.zeros(6, 8, 8)}, "train part: images of shape"),
        ({"train_x": torch.zeros(0, 1, 8, 8), "train_y": torch.zeros(0, dtype=torch.int64)}, "at least one image"),
        ({"test_y": torch.zeros(5, dtype=torch.int64)}, "test part: .* one label for each"),
        ({"train_x": torch.zeros(6, 1, 8, 8, dtype=torch.int64)}, "needs floats"),
        ({"train_y": torch.zeros(6)}, "torch.int64"),
        ({"train_x": torch.full((6, 1, 8, 8), float("nan"))}, "NaN"),
        ({"test_y": torch.full((4,), 2)}, "outside 0 to 1"),
        ({"train_y": torch.full((6,), -1)}, "outside 0 to 1"),
        ({"test_x": torch.zeros(4, 1, 8, 9)}, "one shape"),
    ],
)
def test_malformed_data_is_refused(change, complaint):
    whole = {
        "name": "toy",
        "train_x": torch.zeros(6, 1, 8, 8),
        "train_y": torch.zeros(6, dtype=torch.int64),
        "test_x": torch.zeros(4, 1, 8, 8),
        "test_y": torch.ones(4, dtype=torch.int64),
        "classes": 2,
    }
    Dataset(**whole)
    with pytest.raises(DataError, match=complaint):
        Dataset(**{**whole, **change})


def test_a_dataset_is_frozen(digits):
    with pytest.raises(dataclasses.FrozenInstanceError):
        digits.classes = 3
