"""From what a user writes to a dataset, over every format."""

import errno
import json
import math
import os
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch

from darknight.data import DATASETS, Dataset, Normalisation, Unlabelled, files, read_dataset, read_either, read_examples
from darknight.errors import DataError, UsageError
from data import makers

FORMATS = {"png": "folder", "jpeg": "folder", "mnist-gz": "mnist", "npz-compressed": "npz"}


@pytest.fixture(params=makers.MAKERS)
def made(request, tmp_path):
    return makers.MAKERS[request.param](tmp_path / "set")


def test_every_format_is_tested_here():
    names = {FORMATS.get(name, name.split("-")[0]) for name in makers.MAKERS}
    assert names | {"digits", "fashion-mnist"} == set(DATASETS)


# --- conformance: the same for every format ---------------------------------------------------------------------------
def test_a_path_is_recognised_by_what_is_there(made):
    named, guessed = (read_dataset(source, seed=0) for source in (made.source, str(made.path)))
    assert (named.name, len(named.train), named.shape) == (guessed.name, len(guessed.train), guessed.shape)


def test_the_parts_are_as_promised(made):
    data, train, test = makers.read_all(made.source)
    assert isinstance(data, Dataset)
    for part, x in ((data.train, train), (data.test, test)):
        assert x.shape == (len(part), *data.shape)
        assert (x.dtype, part.labels.dtype) == (torch.float32, torch.int64)
        assert x.is_contiguous()
        order = torch.tensor([len(part) - 1, 0, 0])
        assert torch.equal(part.examples(order), x[order])
    assert torch.equal(data.train_x, train)
    assert data.train_x is data.train_x
    assert torch.equal(data.test_y, data.test.labels)


@pytest.mark.parametrize("name", sorted(set(makers.MAKERS) - {"png", "jpeg"}))  # those have constants
def test_the_training_part_has_mean_0_and_deviation_1(tmp_path, name):
    _, train, _ = makers.read_all(makers.MAKERS[name](tmp_path / "set").source)
    axes = tuple(axis for axis in range(train.ndim) if axis != 1)
    assert train.double().mean(dim=axes).abs().max() < 1e-5
    assert (train.double().std(dim=axes, correction=0) - 1).abs().max() < 1e-5


def test_the_split_depends_on_the_seed_alone(tmp_path):
    path = makers.npz_of(tmp_path / "set.npz", x=makers.images(50, shape=(4,)), y=np.arange(50) % 5)
    for source in (str(path), "digits", str(makers.table(tmp_path / "table", rows=50).path)):
        first, again, other = (read_dataset(source, seed=seed) for seed in (5, 5, 6))
        assert torch.equal(first.train_x, again.train_x)
        assert torch.equal(first.test_y, again.test_y)
        assert not torch.equal(first.test_x, other.test_x)
        examples = len(first.train) + len(first.test)
        assert len(read_dataset(source, seed=5, test_share=0.4).test) == math.ceil(0.4 * examples)


def test_a_share_for_data_with_a_test_part_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has a test part of its own"):
        read_dataset(makers.mnist(tmp_path / "set").source, seed=0, test_share=0.1)


def test_only_folders_are_scaled(tmp_path):
    made = makers.mnist(tmp_path / "set")
    assert read_dataset(made.source, seed=0, image_size=28).shape == (1, 28, 28)
    with pytest.raises(UsageError, match="only pictures in folders are scaled"):
        read_dataset(made.source, seed=0, image_size=32)
    with pytest.raises(UsageError, match="image size 0"):
        read_dataset(made.source, seed=0, image_size=0)


# --- names and paths --------------------------------------------------------------------------------------------------
def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match=r"unknown data 'imagenet'; use one of digits. Or cifar10:FOLDER, .*csv:FILE"):
        read_dataset("imagenet", seed=0)


@pytest.mark.parametrize("source", ["patients.csv", "./imagenet", "data/imagenet"])
def test_a_path_that_is_not_there_is_called_a_path(source):
    with pytest.raises(UsageError, match=f"^{source}: there is no file or folder of that name. Check"):
        read_dataset(source, seed=0)


@pytest.mark.parametrize("source", ["cifar10", "cifar10:", "npz:", "digits:here", "digits:"])
def test_a_name_and_its_argument_belong_together(source):
    name = source.split(":")[0]
    with pytest.raises(UsageError, match=f"write {name}"):
        read_dataset(source, seed=0)


@pytest.mark.parametrize("what", ["folder", "file", "empty"])
def test_a_path_of_another_kind_is_refused_with_what_was_looked_for(tmp_path, what):
    path = tmp_path if what == "folder" else tmp_path / "set.bin"
    if what != "folder":
        path.write_bytes(b"1" * (what == "file"))
    with pytest.raises(UsageError, match=r"format is not known. Looked for cifar10: data_batch_1 and .* csv: a file"):
        read_dataset(str(path), seed=0)


def test_nothing_is_refused_too():
    with pytest.raises(UsageError, match="unknown data ''"):
        read_dataset("", seed=0)


@pytest.mark.parametrize("name", [name for name, form in DATASETS.items() if form.argument])
def test_a_place_where_there_is_nothing_is_named(tmp_path, name):
    with pytest.raises(DataError, match="nowhere"):
        read_dataset(f"{name}:{tmp_path / 'nowhere'}", seed=0)


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    """As root may read everything, the permission is taken in Python."""

    def refuse(path, *arguments, **settings):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    made = makers.mnist(tmp_path / "set")
    monkeypatch.setattr(files, "open", refuse, raising=False)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte: cannot be read \(Permission denied\)"):
        read_dataset(made.source, seed=0)


def test_pipes_are_not_waited_for(tmp_path):
    made = makers.mnist(tmp_path / "set")
    (made.path / "train-labels-idx1-ubyte").unlink()
    os.mkfifo(made.path / "train-labels-idx1-ubyte")
    with pytest.raises(DataError, match="train-labels-idx1-ubyte is missing"):
        read_dataset(made.source, seed=0)
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match=r"pipe.npz: is not a regular file"):
        read_dataset(f"npz:{tmp_path / 'pipe.npz'}", seed=0)


# --- digits -----------------------------------------------------------------------------------------------------------
def test_digits_are_split_one_to_four_and_normalised_by_their_training_part():
    digits, train, _ = makers.read_all("digits")
    assert (digits.train_x.shape, digits.test_x.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (digits.shape, digits.classes) == ((1, 8, 8), 10)
    assert abs(float(train.mean())) < 1e-5
    assert abs(float(train.std()) - 1) < 1e-5


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        read_dataset("digits", seed=0)


# --- examples for a trained model -------------------------------------------------------------------------------------
def test_a_model_sees_examples_as_in_training(made):
    data, _, test = makers.read_all(made.source)
    kept = Normalisation(**json.loads(json.dumps(asdict(data.normalisation))))
    part = read_examples(made.source, normalisation=kept, label_names=data.label_names)
    x = part.examples(torch.arange(len(part)))
    if made.source.startswith("csv:"):  # no test part: all of it
        assert torch.equal(x[data.test.chosen], test)
        assert torch.equal(part.labels[data.train.chosen], data.train.labels)
    else:
        assert torch.equal(x, test)
        assert torch.equal(part.labels, data.test.labels)


def test_labels_follow_the_names_of_the_model(tmp_path):
    made = makers.pictures(tmp_path / "pets")
    settings = {"normalisation": Normalisation((0, 0, 0), (1, 1, 1)), "image_size": 8}
    source = str(made.path / "val")
    part = read_examples(source, label_names=("dogs", "birds", "cats"), **settings)
    assert part.labels.tolist() == [2, 2, 0, 0]
    with pytest.raises(DataError, match="some of the classes"):
        read_examples(source, label_names=("dogs", "birds"), **settings)
    assert read_examples(source, **settings).labels.tolist() == [0, 0, 1, 1]


def test_labels_may_be_missing(tmp_path):
    made = makers.pictures(tmp_path / "pets")
    flat = read_examples(
        str(made.path / "val" / "cats"), normalisation=Normalisation((0, 0, 0), (1, 1, 1)), label_names=("a", "b")
    )
    assert flat.labels.tolist() == [-1, -1]
    assert flat.place(1).endswith("1.png")
    path = makers.npz_of(tmp_path / "set.npz", x=makers.images(5, shape=(3, 8, 8)))
    bare = read_examples(str(path), normalisation=Normalisation((0, 0, 0), (1, 1, 1)))
    assert bare.labels.tolist() == [-1] * 5
    assert bare.examples(torch.arange(5)).shape == (5, 3, 8, 8)


def test_examples_of_another_shape_than_the_models_are_refused(tmp_path):
    with pytest.raises(DataError, match="the model was trained on 3 channels"):
        read_examples(makers.mnist(tmp_path / "set").source, normalisation=Normalisation((0, 0, 0), (1, 1, 1)))


# --- with labels or without -------------------------------------------------------------------------------------------
def test_where_labels_are_there_it_is_the_dataset(made):
    data, either = read_dataset(made.source, seed=4), read_either(made.source, seed=4)
    assert isinstance(either, Dataset)
    for mine, yours in ((either.train, data.train), (either.test, data.test)):
        assert torch.equal(mine.chosen, yours.chosen)
        assert torch.equal(mine.labels, yours.labels)
    assert either.normalisation == data.normalisation


def test_where_they_are_missing_it_is_all_examples_in_their_order(tmp_path):
    x = makers.images(5, shape=(3, 8, 8))
    path = makers.npz_of(tmp_path / "set.npz", x=x)
    either = read_either(str(path), seed=0)
    assert isinstance(either, Unlabelled)
    assert (either.train, either.labelled, either.classes, either.label_names) == (None, 0, 0, None)
    assert torch.equal(either.test.source.read(torch.arange(5)), torch.from_numpy(x))
    assert either.test.chosen.tolist() == [0, 1, 2, 3, 4]
    # As they are: who has the model normalises them.
    assert torch.equal(either.test.examples(torch.arange(5)), torch.from_numpy(x).float() / 255)

    made = makers.pictures(tmp_path / "pets")
    flat = read_either(str(made.path / "val" / "cats"), seed=0, image_size=9)
    assert (len(flat), flat.labelled, flat.shape, flat.label_names) == (2, 0, (3, 9, 9), None)


def test_parts_keep_the_labels_that_they_have(tmp_path):
    x = makers.images(7, shape=(3, 8, 8))
    path = makers.npz_of(tmp_path / "set.npz", train_x=x[:4], train_y=np.array([0, 1, 2, 0]), test_x=x[4:])
    either = read_either(str(path), seed=0)
    assert either.train.labels.tolist() == [0, 1, 2, 0]
    assert either.test.labels.tolist() == [-1] * 3
    assert (either.labelled, either.classes) == (4, 3)


def test_nothing_is_set_apart_without_labels(tmp_path):
    path = makers.npz_of(tmp_path / "set.npz", x=makers.images(5, shape=(3, 8, 8)))
    with pytest.raises(UsageError, match="Leave out the test share"):
        read_either(str(path), seed=0, test_share=0.5)
    with pytest.raises(DataError, match=r"Needs x.npy and y.npy"):
        read_dataset(str(path), seed=0)
