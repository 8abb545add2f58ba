"""Folders of pictures: which files, which classes, and what is done to a picture."""

import os
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from darknight.data import IMAGENET, Augmentation, read_dataset
from darknight.data.pictures import Pictures
from darknight.errors import DataError
from data import makers


def test_two_folders_of_classes(tmp_path):
    made = makers.pictures(tmp_path / "pets")
    data, train, test = makers.read_all(made.source)
    assert (data.name, data.classes, data.label_names) == ("pets", 2, ("cats", "dogs"))
    assert data.shape == (3, 224, 224)
    assert train.shape == test.shape == (4, 3, 224, 224)
    assert data.train.labels.tolist() == data.test.labels.tolist() == [0, 0, 1, 1]
    assert data.normalisation == IMAGENET
    assert data.augmentation == Augmentation.imagenet()
    assert data.train.place(3).endswith(os.path.join("train", "dogs", "1.png"))


def test_one_folder_of_classes_is_split(tmp_path):
    made = makers.pictures(tmp_path / "pets", per_class=5)
    data = read_dataset(str(made.path / "train"), seed=0, image_size=16)
    assert (len(data.train), len(data.test), data.shape) == (8, 2, (3, 16, 16))
    assert sorted(data.test.labels.tolist()) == [0, 1]


def test_test_is_another_name_for_val(tmp_path):
    made = makers.pictures(tmp_path / "pets")
    (made.path / "val").rename(made.path / "test")
    assert len(read_dataset(made.source, seed=0).test) == 4


def test_the_middle_of_the_scaled_picture_is_cut_out(tmp_path):
    """Left third red, middle green, right blue, top and bottom rows black: only green is in the middle."""
    pixels = np.zeros((100, 300, 3), dtype=np.uint8)
    for third in range(3):
        pixels[3:-3, 100 * third : 100 * (third + 1), third] = 255
    for part in ("train", "val"):
        (tmp_path / part / "flags").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / part / "flags" / "flag.png")
    _, train, _ = makers.read_all(str(tmp_path), image_size=70)  # scaled to 80 x 240, so 5 rows are cut off above
    raw = train[0] * torch.tensor(IMAGENET.std).view(3, 1, 1) + torch.tensor(IMAGENET.mean).view(3, 1, 1)
    assert torch.allclose(raw, torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1).expand(3, 70, 70), atol=1e-6)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "I;16", "CMYK"])
def test_other_modes_become_three_channels(tmp_path, mode):
    folder = tmp_path / "one"
    folder.mkdir()
    ending = "jpg" if mode == "CMYK" else "png"
    picture = Image.new("I;16" if mode == "I;16" else mode, (20, 30))
    picture.save(folder / f"0.{ending}")
    assert Pictures(folder, (f"0.{ending}",), 8).read(torch.tensor([0])).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("ending", ["png", "pgm"])
def test_sixteen_bits_of_grey_are_not_cut_off(tmp_path, ending):
    Image.fromarray(np.full((5, 5), 30_000, dtype=np.uint16)).save(tmp_path / f"0.{ending}")
    assert (Pictures(tmp_path, (f"0.{ending}",), 8).read(torch.tensor([0])) == 30_000 >> 8).all()


def test_floats_are_refused(tmp_path):
    Image.new("F", (5, 5)).save(tmp_path / "0.ppm")
    with pytest.raises(DataError, match=r"0.ppm: its pixels are floats"):
        Pictures(tmp_path, ("0.ppm",), 8).read(torch.tensor([0]))


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (3, 2), (2000, 1500)])
def test_any_size_is_scaled(tmp_path, size):
    Image.new("RGB", size, (10, 20, 30)).save(tmp_path / "0.jpg", quality=100)
    found = Pictures(tmp_path, ("0.jpg",), 9).read(torch.tensor([0]))[0].float()
    assert (found.mean(dim=(1, 2)) - torch.tensor([10.0, 20, 30])).abs().max() < 3


def test_a_name_does_not_decide_what_a_file_is(tmp_path):
    """As in ImageNet itself, where one PNG is called JPEG."""
    made = makers.pictures(tmp_path / "pets")
    path = made.path / "train" / "cats" / "0.png"
    path.rename(path.with_suffix(".JPEG"))
    assert len(makers.read_all(made.source, image_size=8)[1]) == 4


def test_files_that_are_no_pictures_and_hidden_ones_are_left_out(tmp_path):
    made = makers.pictures(tmp_path / "pets")
    (made.path / "train" / "cats" / "notes.txt").write_text("nice")
    (made.path / "train" / "cats" / ".0.png").write_bytes(b"")
    (made.path / "train" / ".cache").mkdir()
    os.mkfifo(made.path / "train" / "cats" / "pipe.png")
    below = made.path / "train" / "cats" / "more"
    below.mkdir()
    Image.new("RGB", (5, 5)).save(below / "9.png")
    data = read_dataset(made.source, seed=0, image_size=8)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert data.train.place(2).endswith(os.path.join("cats", "more", "9.png"))


def test_pictures_are_read_only_when_asked_for(tmp_path):
    made = makers.pictures(tmp_path / "pets")
    (made.path / "train" / "dogs" / "1.png").write_bytes(b"no picture")
    data = read_dataset(made.source, seed=0, image_size=8)
    assert data.train.examples(torch.tensor([0, 1, 2])).shape == (3, 3, 8, 8)
    with pytest.raises(DataError, match=r"dogs/1.png: .* Needs a picture: JPEG, PNG"):
        data.train.examples(torch.tensor([0, 3]))


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 30_000, 100_000, (1 << 31) - 1])
def test_a_bomb_is_refused(tmp_path, side):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(1 << 20), 9))
    (tmp_path / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b""))
    with pytest.raises(DataError, match=r"0.png: (\d+x\d+ pixels; at most|is damaged .*Bomb)"):
        Pictures(tmp_path, ("0.png",), 8).read(torch.tensor([0]))


def test_a_picture_that_would_be_scaled_up_beyond_measure_is_refused(tmp_path):
    Image.new("L", (1, 50_000)).save(tmp_path / "0.png")
    with pytest.raises(DataError, match=r"0.png: 1x50000 pixels are too slim"):
        Pictures(tmp_path, ("0.png",), 224).read(torch.tensor([0]))


@pytest.mark.parametrize("ending", ["tiff", "gif", "eps"])
def test_other_decoders_are_not_asked(tmp_path, ending):
    """A file called .png is what it is; only five decoders get to see it."""
    Image.new("RGB", (5, 5)).save(tmp_path / f"0.{ending}")
    (tmp_path / f"0.{ending}").rename(tmp_path / "0.png")
    with pytest.raises(DataError, match=r"0.png: "):
        Pictures(tmp_path, ("0.png",), 8).read(torch.tensor([0]))


def break_it(folder, how):
    if how == "no classes":
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (folder / "train").mkdir()
    elif how == "no test":
        (folder / "val").rename(folder / "other")
    elif how == "flat test":
        for path in list((folder / "val").rglob("*.png")):
            path.rename(folder / "val" / f"{path.parent.name}{path.name}")
        for path in list((folder / "val").iterdir()):
            if path.is_dir():
                path.rmdir()
    elif how == "unknown class":
        (folder / "val" / "dogs").rename(folder / "val" / "wolves")
    elif how == "empty class":
        (folder / "train" / "birds").mkdir()


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("no classes", "train: holds no folders"),
        ("no test", "neither val nor test"),
        ("flat test", "val: holds no folders"),
        ("unknown class", "wolves: is a class that the training part does not have"),
        ("empty class", "birds: holds no pictures"),
    ],
)
def test_folders_that_are_otherwise_are_refused(tmp_path, how, complaint):
    made = makers.pictures(tmp_path / "pets")
    break_it(made.path, how)
    with pytest.raises(DataError, match=complaint):
        read_dataset(made.source, seed=0)


def test_without_pillow_the_error_says_what_to_install(tmp_path, monkeypatch):
    made = makers.pictures(tmp_path / "pets")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="pip install pillow"):
        read_dataset(made.source, seed=0)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file: is not a folder"):
        read_dataset(f"folder:{tmp_path / 'file'}", seed=0)
