"""Folders of photographs in the way of ImageNet: one folder for each class, pictures inside.

Either PATH/train/CLASS/... and PATH/val/CLASS/... (or test/), or PATH/CLASS/... alone. Pictures are decoded by Pillow
when they are asked for: the shorter side scaled to 8/7 of the wanted size (256 for 224), the middle cut out, three
channels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from darknight.data.augment import Augmentation
from darknight.data.files import refusing
from darknight.data.found import MOST_CLASSES, UNKNOWN, Found, Labelled
from darknight.data.normalise import IMAGENET
from darknight.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SIZE = 224
# Decoders that are asked, by Pillow's names, and the endings of their files. The fewer, the less can be attacked.
_FORMATS = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "PPM": (".ppm", ".pgm"),
    "WEBP": (".webp",),
}
_ENDINGS = tuple(ending for endings in _FORMATS.values() for ending in endings)
_NEEDED = f"a picture: {', '.join(_FORMATS)}"
_MOST_PIXELS = 89_478_485  # 256 MiB of RGB; where Pillow begins to warn of decompression bombs
_TEST_FOLDERS = ("val", "test")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Picture files, by their names below `folder`."""

    folder: Path
    names: Sequence[str]
    size: int

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return 3, self.size, self.size

    def __len__(self) -> int:
        return len(self.names)

    def read(self, indices: Tensor) -> Tensor:
        out = np.empty((len(indices), self.size, self.size, 3), dtype=np.uint8)
        for at, index in enumerate(indices.tolist()):
            out[at] = _decoded(self.folder / self.names[index], self.size)
        return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous()

    def place(self, index: int) -> str:
        return str(self.folder / self.names[index])


def has_pictures(folder: Path) -> bool:
    """Does `folder` hold train/, or class folders with at least one picture?"""
    if (folder / "train").is_dir():
        return True
    return any(next(_below(child), None) is not None for child in _folders_in(folder))


def read_pictures(folder: Path, image_size: int | None, *, labelled: bool = True) -> Found:
    """The pictures below `folder`. labelled=False: they may also lie in it directly, and have no labels then."""
    size = image_size or IMAGE_SIZE
    _check_pillow()  # say what is missing now, not at the first batch
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a folder. Needs one with a folder of pictures for each class.")
    classes: tuple[str, ...] = ()
    test = None
    if not labelled and not _folders_in(folder):
        train = _unlabelled(folder, size)
    elif (folder / "train").is_dir():
        classes = _classes(folder / "train")
        train = _labelled(folder / "train", classes, size)
        test = _labelled(_test_folder(folder), classes, size)
    else:
        classes = _classes(folder)
        train = _labelled(folder, classes, size)
    return Found(
        name=folder.name or str(folder),
        train=train,
        test=test,
        classes=len(classes),
        label_names=classes,
        normalisation=IMAGENET,
        augmentation=Augmentation.imagenet(),
    )


# --- which files ------------------------------------------------------------------------------------------------------
def _classes(folder: Path) -> tuple[str, ...]:
    classes = tuple(child.name for child in _folders_in(folder))
    if not classes:
        raise DataError(f"{folder}: holds no folders. Needs one folder of pictures for each class.")
    if len(classes) > MOST_CLASSES:
        raise DataError(f"{folder}: {len(classes)} folders; at most {MOST_CLASSES} classes are possible.")
    return classes


def _test_folder(folder: Path) -> Path:
    found = [folder / name for name in _TEST_FOLDERS if (folder / name).is_dir()]
    if not found:
        raise DataError(
            f"{folder}: holds train and neither {' nor '.join(_TEST_FOLDERS)}. Needs pictures to test with."
        )
    return found[0]


def _labelled(folder: Path, classes: tuple[str, ...], size: int) -> Labelled:
    number = {name: at for at, name in enumerate(classes)}
    names, labels = list[str](), list[int]()
    children = _folders_in(folder)
    if not children:
        raise DataError(f"{folder}: holds no folders. Needs one folder of pictures for each class, as in train.")
    for child in children:
        if child.name not in number:
            raise DataError(f"{child}: is a class that the training part does not have. Remove it, or add it there.")
        before = len(names)
        names.extend(f"{child.name}/{name}" for name in _below(child))
        if len(names) == before:
            raise DataError(f"{child}: holds no pictures. Needs files that end in {', '.join(_ENDINGS)}.")
        labels.extend([number[child.name]] * (len(names) - before))
    return Labelled(Pictures(folder, names, size), torch.tensor(labels, dtype=torch.int64))


def _unlabelled(folder: Path, size: int) -> Labelled:
    names = list(_below(folder))
    if not names:
        raise DataError(f"{folder}: holds no pictures. Needs files that end in {', '.join(_ENDINGS)}.")
    return Labelled(Pictures(folder, names, size), torch.full((len(names),), UNKNOWN, dtype=torch.int64))


def _folders_in(folder: Path) -> list[Path]:
    """Sorted by name; a link to a folder is a folder, a hidden one is not."""
    with refusing(folder, "a folder that can be read"), os.scandir(folder) as entries:
        found = [Path(entry) for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(found)


def _below(folder: Path) -> Iterator[str]:
    """Picture files in `folder` and in folders below it, by their names from there, in order."""
    with refusing(folder, "a folder that can be read"), os.scandir(folder) as entries:
        children = sorted(
            (entry.name, entry.is_dir(follow_symlinks=False), entry.is_file())
            for entry in entries
            if not entry.name.startswith(".")
        )
    for name, is_folder, is_file in children:
        if is_folder:
            yield from (f"{name}/{below}" for below in _below(folder / name))
        elif is_file and name.lower().endswith(_ENDINGS):
            yield name


# --- one picture ------------------------------------------------------------------------------------------------------
def _check_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError("pictures are decoded by Pillow, which is not installed. Run: pip install pillow") from error


def _decoded(path: Path, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """(height, width, channel). The rotation that a camera noted is not applied, as is usual for ImageNet."""
    from PIL import Image

    # Pillow's decoders raise whatever they stumble over.
    with refusing(path, _NEEDED, Exception), Image.open(path, formats=list(_FORMATS)) as picture:
        width, height = picture.size
        if width * height > _MOST_PIXELS:
            raise DataError(
                f"{path}: {width}x{height} pixels; at most {_MOST_PIXELS} are decoded. Scale it down, if it is honest."
            )
        shorter = round(size * 8 / 7)
        scale = shorter / min(width, height)
        # A JPEG much larger than needed is decoded at a half, a quarter or an eighth, but never below twice the need.
        picture.draft("RGB", (round(2 * width * scale), round(2 * height * scale)))
        wide, high = max(size, round(width * scale)), max(size, round(height * scale))
        if max(wide, high) * shorter > _MOST_PIXELS:
            raise DataError(f"{path}: {width}x{height} pixels are too slim to scale to {shorter}. Cut it.")
        left, upper = (wide - size) // 2, (high - size) // 2
        scaled = _in_colour(picture, path).resize((wide, high), Image.Resampling.BILINEAR)
        return np.asarray(scaled.crop((left, upper, left + size, upper + size)))


def _in_colour(picture: Image.Image, path: Path) -> Image.Image:
    """Three channels of bytes. Pillow alone would cut 16 bits of grey off at 255, which leaves nothing but white."""
    from PIL import Image

    if picture.mode == "F":
        raise DataError(f"{path}: its pixels are floats without a range. Needs bytes, or 16 bits of grey.")
    if picture.mode.startswith("I"):
        grey = np.asarray(picture).clip(0, (1 << 16) - 1) >> 8
        picture = Image.fromarray(grey.astype(np.uint8))
    return picture.convert("RGB")
