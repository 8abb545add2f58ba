"""Datasets and their parts: what they refuse to be, and that both kinds of parts read alike."""

import dataclasses

import numpy as np
import pytest
import torch

from darknight.data import Dataset, Examples, Normalisation, Tensors, Unlabelled
from darknight.data.source import InMemory
from darknight.errors import DataError, UsageError


def part(examples=6, shape=(1, 8, 8), label=0):
    return Tensors(torch.zeros(examples, *shape), torch.full((examples,), label))


def test_a_dataset_of_tensors_has_everything_its_users_ask_for():
    x, y = torch.rand(6, 3, 4, 5), torch.arange(6) % 2
    data = Dataset("toy", Tensors(x, y), Tensors(x[:2], y[:2]), 2, ("no", "yes"))
    assert data.shape == (3, 4, 5)
    assert data.train_x is x
    assert data.train_y is y
    assert torch.equal(data.test_x, x[:2])
    assert torch.equal(data.test_y, y[:2])
    assert torch.equal(data.train.examples(torch.tensor([4, 0, 4])), x[[4, 0, 4]])


def test_a_table_has_a_shape_of_columns():
    assert Dataset("toy", part(shape=(7,)), part(shape=(7,)), 1).shape == (7,)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"train": part(shape=(8, 8))}, r"train part: examples of shape \(8, 8\)"),
        ({"train": part(shape=(1, 0, 8))}, "train part: examples of shape"),
        ({"train": part(examples=0)}, "at least one example"),
        ({"test": Tensors(torch.zeros(4, 1, 8, 8), torch.zeros(5, dtype=torch.int64))}, "test part: .* label for each"),
        ({"train": Tensors(torch.zeros(6, 1, 8, 8), torch.zeros(6))}, "torch.int64"),
        ({"test": part(label=2)}, "outside 0 to 1"),
        ({"train": part(label=-1)}, "outside 0 to 1"),
        ({"test": part(shape=(1, 8, 9))}, "one shape"),
        ({"label_names": ("one",)}, "1 names for 2 classes"),
    ],
)
def test_malformed_data_is_refused(change, complaint):
    whole = {"name": "toy", "train": part(), "test": part(examples=4, label=1), "classes": 2}
    Dataset(**whole)
    with pytest.raises(DataError, match=complaint):
        Dataset(**{**whole, **change})


@pytest.mark.parametrize(
    ("x", "complaint"), [(torch.zeros(2, 1, 2, 2, dtype=torch.int64), "floats"), (torch.full((2, 3), torch.nan), "NaN")]
)
def test_tensors_must_be_finite_floats(x, complaint):
    with pytest.raises(DataError, match=complaint):
        Tensors(x, torch.zeros(2, dtype=torch.int64))


def test_a_dataset_is_frozen():
    data = Dataset("toy", part(), part(), 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.classes = 3


# --- without labels ---------------------------------------------------------------------------------------------------
def test_examples_without_labels_are_no_dataset():
    bare = Unlabelled("toy", None, part(label=-1), 0)
    assert (len(bare), bare.labelled, bare.shape) == (6, 0, (1, 8, 8))
    mixed = Unlabelled("toy", part(examples=3, label=1), part(examples=5, label=-1), 2, ("no", "yes"))
    assert (len(mixed), mixed.labelled) == (8, 3)
    assert Dataset("toy", part(), part(examples=4), 1).labelled == 10


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"test": part(label=-2)}, "outside 0 to 1"),
        ({"test": part(label=2)}, "outside 0 to 1"),
        ({"train": part(shape=(1, 8, 9))}, "one shape"),
        ({"train": part(examples=0)}, "at least one example"),
        ({"test": part(shape=(8, 8))}, "test part: examples of shape"),
        ({"label_names": ("one",)}, "1 names for 2 classes"),
        ({"test": part(label=1)}, "every example has a label"),
    ],
)
def test_malformed_examples_without_labels_are_refused(change, complaint):
    whole = {"name": "toy", "train": part(), "test": part(label=-1), "classes": 2}
    Unlabelled(**whole)
    with pytest.raises(DataError, match=complaint):
        Unlabelled(**{**whole, **change})


@pytest.fixture(params=["tensors", "examples"])
def either(request):
    """The numbers 10 to 14, five examples of one column, as both kinds of parts."""
    values = np.arange(10.0, 15).reshape(5, 1)
    if request.param == "tensors":
        return Tensors(torch.from_numpy(values).float(), torch.arange(5))
    chosen = torch.tensor([4, 3, 2, 1, 0])
    return Examples(InMemory("here", values[::-1].copy()), chosen, torch.arange(5), Normalisation((0.0,), (1.0,)))


def test_examples_come_in_the_order_asked_for(either):
    assert either.examples(torch.tensor([3, 0, 3])).tolist() == [[13], [10], [13]]
    assert either.examples(torch.empty(0, dtype=torch.int64)).shape == (0, 1)
    assert either.examples(torch.tensor([1])).dtype == torch.float32


@pytest.mark.parametrize("indices", [torch.tensor([5]), torch.tensor([-1]), torch.tensor([[0]]), torch.tensor([True])])
def test_indices_that_are_none_are_refused(either, indices):
    with pytest.raises(IndexError):
        either.examples(indices)


def test_a_value_that_is_not_finite_is_found_when_it_is_read_and_its_place_named():
    values = np.ones((5, 2))
    values[3, 1] = np.inf
    bad = Examples(InMemory("some.file", values), torch.tensor([0, 3]), torch.zeros(2), Normalisation((0, 0), (1, 1)))
    assert bad.examples(torch.tensor([0])).tolist() == [[1, 1]]
    with pytest.raises(DataError, match=r"some\.file, example 3: some values are NaN or infinite"):
        bad.examples(torch.tensor([0, 1]))
    assert bad.place(1) == "some.file, example 3"


def test_what_does_not_fit_in_memory_is_not_read_whole():
    class Huge:
        labels = torch.zeros(1, dtype=torch.int64).expand(1 << 20)
        shape = (3, 224, 224)

        def __len__(self):
            return 1 << 20

    data = Dataset("huge", Huge(), Huge(), 1)
    with pytest.raises(UsageError, match="Read batches"):
        data.train_x  # noqa: B018
