"""MNIST and Fashion-MNIST as IDX files, plain and compressed."""

import gzip
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch

from darknight.data import Augmentation, read_dataset
from darknight.data.source import InMemory, Records
from darknight.errors import DataError
from data import makers

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where the package dataset-fashion-mnist puts it


@pytest.fixture(params=[False, True], ids=["plain", "gz"])
def packed(request):
    return request.param


@pytest.fixture
def made(tmp_path, packed):
    return makers.mnist(tmp_path / "set", packed=packed)


def test_images_and_labels_are_those_that_were_written(made, packed):
    data, train, test = makers.read_all(made.source)
    assert torch.allclose(train, makers.normalised(made.train_x, made.train_x), atol=1e-5)
    assert torch.allclose(test, makers.normalised(made.test_x, made.train_x), atol=1e-5)
    assert data.train.labels.tolist() == made.train_y
    assert data.test.labels.tolist() == made.test_y
    assert (data.name, data.shape, data.classes, data.augmentation) == ("mnist", (1, 28, 28), 10, None)
    assert isinstance(data.train.source, InMemory if packed else Records)


def test_fashion_has_names_and_may_be_mirrored(tmp_path):
    made = makers.mnist(tmp_path / "fashion-mnist", packed=True)
    for source in (f"fashion-mnist:{made.path}", str(made.path)):
        data = read_dataset(source, seed=0)
        assert data.name == "fashion-mnist"
        assert data.label_names[9] == "Ankle boot"
        assert data.augmentation == Augmentation()


@pytest.mark.parametrize("below", ["raw", "MNIST/raw", "FashionMNIST/raw"])
def test_other_tools_folders_are_found(tmp_path, below):
    makers.mnist(tmp_path / "set" / below)
    assert len(read_dataset(f"mnist:{tmp_path / 'set'}", seed=0).train) == 12


def test_names_with_a_dot_are_found_too(made):
    for path in list(made.path.iterdir()):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    assert len(read_dataset(made.source, seed=0).train) == 12


@pytest.mark.parametrize("name", ["t10k-images-idx3-ubyte", "train-labels-idx1-ubyte"])
def test_a_missing_file_is_named(made, packed, name):
    (made.path / f"{name}{'.gz' * packed}").unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        read_dataset(made.source, seed=0)


def change(made, packed, change, name="train-images-idx3-ubyte"):
    path = made.path / f"{name}{'.gz' * packed}"
    content = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    content = change(content)
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:10],
        lambda content: b"",
        lambda content: b"\0\0\x08\x01" + content[4:],
        lambda content: b"\0\0\x0d\x03" + content[4:],  # floats
        lambda content: content[:4] + bytes(4) + content[8:],  # no examples
        lambda content: content[:4] + b"\xff" * 12 + content[16:],
        lambda content: content[:4] + struct.pack(">III", 1 << 31, 1, 1) + content[16:],
    ],
)
def test_more_or_less_than_the_header_announces_is_refused_by_name(made, packed, damage):
    path = change(made, packed, damage)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=path.name):
            read_dataset(made.source, seed=0)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_label_for_each_image(made, packed):
    path = change(made, packed, lambda content: makers.idx([1, 2, 3]), "t10k-labels-idx1-ubyte")
    with pytest.raises(DataError, match=f"{path.name}: 3 labels for 5 images"):
        read_dataset(made.source, seed=0)


def test_labels_are_digits(made, packed):
    path = change(made, packed, lambda content: content[:-1] + b"\x0a", "train-labels-idx1-ubyte")
    with pytest.raises(DataError, match=f"{path.name}: some labels are outside 0 to 9"):
        read_dataset(made.source, seed=0)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-6], lambda raw: raw[:-8] + bytes(4) + raw[-4:]])
def test_a_checksum_of_gzip_is_believed(tmp_path, damage):
    made = makers.mnist(tmp_path / "set", packed=True)
    path = made.path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=path.name):
        read_dataset(made.source, seed=0)


def test_a_bomb_is_stopped_at_the_size_that_its_header_announces(tmp_path):
    """8 MiB of zeros behind a header that announces one image."""
    made = makers.mnist(tmp_path / "set", packed=True)
    path = change(made, True, lambda content: content[:4] + struct.pack(">III", 1, 28, 28) + bytes(8 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=f"{path.name}: goes on after the 784 bytes"):
            read_dataset(made.source, seed=0)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist():
    data = read_dataset(str(DEBIAN), seed=0)
    assert (data.name, len(data.train), len(data.test), data.shape) == ("fashion-mnist", 60_000, 10_000, (1, 28, 28))
    assert torch.bincount(data.train.labels).tolist() == [6000] * 10
    assert data.normalisation.mean == pytest.approx((0.2860,), abs=1e-4)
    assert data.normalisation.std == pytest.approx((0.3530,), abs=1e-4)
