"""CIFAR-10 and CIFAR-100, python and binary."""

import pickle
import shutil

import numpy as np
import pytest
import torch

from darknight.data import Augmentation, read_dataset
from darknight.errors import DataError
from data import makers

FORMS = ["cifar10-python", "cifar10-binary", "cifar100-python", "cifar100-binary"]


@pytest.fixture(params=FORMS)
def made(request, tmp_path):
    return makers.MAKERS[request.param](tmp_path / "set")


def test_images_labels_and_names_are_those_that_were_written(made):
    data, train, test = makers.read_all(made.source)
    assert torch.allclose(train, makers.normalised(made.train_x, made.train_x), atol=1e-5)
    assert torch.allclose(test, makers.normalised(made.test_x, made.train_x), atol=1e-5)
    assert data.train.labels.tolist() == made.train_y
    assert data.test.labels.tolist() == made.test_y
    hundred = "100" in made.source.split(":")[0]
    assert data.classes == (100 if hundred else 10)
    names = makers.CIFAR100_NAMES if hundred else makers.CIFAR10_NAMES
    assert data.label_names == tuple(name.decode() for name in names)
    assert data.shape == (3, 32, 32)
    assert data.augmentation == Augmentation(crop_padding=4, flip=True)


def test_a_batch_across_files_comes_in_the_order_asked_for(tmp_path):
    made = makers.cifar10_binary(tmp_path / "set", per_batch=3)
    data, train, _ = makers.read_all(made.source)
    order = torch.tensor([14, 0, 7, 7, 3, 13, 1])
    assert torch.equal(data.train.examples(order), train[order])


def test_pythons_meta_file_is_made_as_the_published_one(tmp_path):
    """Of 158 bytes: so the pickles of these tests have the form of the published ones, instruction by instruction."""
    made = makers.cifar10_python(tmp_path / "set")
    assert (made.path / "batches.meta").stat().st_size == 158
    assert pickle.loads((made.path / "data_batch_1").read_bytes(), encoding="bytes")[b"labels"] == [0, 1]


@pytest.mark.parametrize("archive", ["cifar-10-batches-py", "cifar-10-batches-bin"])
def test_the_folder_that_the_archive_makes_is_found_below(tmp_path, archive):
    make = makers.cifar10_python if archive.endswith("py") else makers.cifar10_binary
    make(tmp_path / archive)
    assert read_dataset(str(tmp_path), seed=0).name == "cifar10"
    assert len(read_dataset(f"cifar10:{tmp_path}", seed=0).train) == 10


def test_an_array_in_fortran_order_is_the_same_array(tmp_path):
    made = makers.cifar10_python(tmp_path / "set")
    batch = makers.cifar_batch(made.train_x[:2], made.train_y[:2])
    batch[b"data"] = np.asfortranarray(batch[b"data"])
    (made.path / "data_batch_1").write_bytes(makers.python2_pickle(batch))
    _, train, _ = makers.read_all(made.source)
    assert torch.allclose(train, makers.normalised(made.train_x, made.train_x), atol=1e-5)


def test_names_may_be_missing(made):
    for name in ("batches.meta", "batches.meta.txt", "meta", "fine_label_names.txt"):
        (made.path / name).unlink(missing_ok=True)
    assert read_dataset(made.source, seed=0).label_names is None


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
def test_a_missing_batch_is_named(tmp_path, name):
    made = makers.cifar10_python(tmp_path / "set")
    (made.path / name).unlink()
    with pytest.raises(DataError, match=f"{name}: there is no such file"):
        read_dataset(made.source, seed=0)


def test_a_batch_that_is_cut_short_is_named(tmp_path):
    made = makers.cifar10_binary(tmp_path / "set")
    with open(made.path / "data_batch_4.bin", "r+b") as file:
        file.truncate(4000)
    with pytest.raises(DataError, match=r"data_batch_4.bin: 4000 bytes .* 3073 bytes for each"):
        read_dataset(made.source, seed=0)


def test_the_files_of_the_other_set_are_not_taken_for_this_one(tmp_path):
    ten, hundred = makers.cifar10_binary(tmp_path / "ten"), makers.cifar100_binary(tmp_path / "hundred")
    shutil.copy(hundred.path / "train.bin", ten.path / "data_batch_1.bin")
    with pytest.raises(DataError, match=r"data_batch_1.bin: 21518 bytes"):
        read_dataset(ten.source, seed=0)


def test_a_label_out_of_range_is_named_with_its_file(made):
    binary = made.path / "test_batch.bin"
    batches = {"test_batch": False, "test": True}
    for name, hundred in batches.items():
        if (made.path / name).exists():
            batch = makers.cifar_batch(made.test_x, [100] * len(made.test_x), hundred=hundred)
            (made.path / name).write_bytes(makers.python2_pickle(batch))
            binary = made.path / name
    for name, at in (("test_batch.bin", 0), ("test.bin", 1)):
        if (made.path / name).exists():
            binary = made.path / name
            with open(binary, "r+b") as file:
                file.seek(at)
                file.write(b"\xff")
    with pytest.raises(DataError, match=f"{binary.name}: some labels"):
        read_dataset(made.source, seed=0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({b"data": [1, 2]}, "holds no 'data'"),
        ({b"labels": b"1, 2"}, "holds no 'data' with 'labels'"),
        ({b"labels": [1]}, r"1 labels for an array of shape \(2, 3072\)"),
        ({b"labels": [1, b"2"]}, "not whole numbers"),
        ({b"data": makers.images(2, shape=(3071,))}, r"shape \(2, 3071\)"),
    ],
)
def test_a_batch_with_other_content_is_refused(tmp_path, change, complaint):
    made = makers.cifar10_python(tmp_path / "set")
    batch = makers.cifar_batch(made.train_x[:2], made.train_y[:2]) | change
    (made.path / "data_batch_2").write_bytes(makers.python2_pickle(batch))
    with pytest.raises(DataError, match=complaint) as caught:
        read_dataset(made.source, seed=0)
    assert "data_batch_2" in str(caught.value)


@pytest.mark.parametrize("names", [[b"one"], [b"same"] * 10, b"names"])
def test_names_that_are_not_of_the_classes_are_refused(tmp_path, names):
    made = makers.cifar10_python(tmp_path / "set")
    (made.path / "batches.meta").write_bytes(makers.python2_pickle({b"label_names": names}))
    with pytest.raises(DataError, match=r"batches.meta: "):
        read_dataset(made.source, seed=0)


def test_a_file_that_changes_during_training_is_noticed(made):
    data = read_dataset(made.source, seed=0)
    changed = next(path for path in sorted(made.path.iterdir()) if path.stat().st_size > 3000)
    with open(changed, "ab") as file:
        file.write(b"more")
    part = data.test if "test" in changed.name else data.train
    with pytest.raises(DataError, match=f"{changed.name}: was changed"):
        part.examples(torch.arange(len(part)))
