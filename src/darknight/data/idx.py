"""MNIST and Fashion-MNIST: IDX files, plain or compressed with gzip.

An IDX file is a header (two zeros, 8 for bytes, the number of axes, then each side in 32 bits, big-endian) and the
bytes. Plain files stay on disk until they are asked for; compressed ones are unpacked in memory, up to MEMORY_LIMIT.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from darknight.data.augment import Augmentation
from darknight.data.files import StillFile, check_unpacked, fill_from, refusing
from darknight.data.found import Found, Labelled, checked_labels
from darknight.data.source import Array, InMemory, Records, Source
from darknight.errors import DataError

_CLASSES = 10
_FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_NEEDED = "an IDX file of bytes, plain or compressed with gzip"
_PARTS = {"train": "train", "test": "t10k"}


def has_mnist(folder: Path) -> bool:
    return _folder_in(folder) is not None


def read_mnist(folder: Path, *, fashion: bool) -> Found:
    """The four files in `folder`, or in the folder below it where other tools keep them."""
    name = "fashion-mnist" if fashion else "mnist"
    place = _folder_in(folder)
    if place is None:
        raise DataError(
            f"{folder}: holds no train-images-idx3-ubyte. Needs the four files of {name}: train- and t10k-, "
            "images-idx3-ubyte and labels-idx1-ubyte, each plain or with .gz."
        )
    train, test = (_read_part(place, prefix) for prefix in _PARTS.values())
    return Found(
        name=name,
        train=train,
        test=test,
        classes=_CLASSES,
        label_names=_FASHION if fashion else tuple(map(str, range(_CLASSES))),
        augmentation=Augmentation() if fashion else None,  # a mirrored digit is no digit
    )


def _folder_in(folder: Path) -> Path | None:
    for place in (folder, folder / "raw", folder / "MNIST" / "raw", folder / "FashionMNIST" / "raw"):
        if _file_in(place, "train", "images-idx3-ubyte") is not None:
            return place
    return None


def _file_in(folder: Path, prefix: str, rest: str) -> Path | None:
    names = (f"{prefix}-{rest}", f"{prefix}-{rest.replace('-', '.', 1)}")
    return next((path for name in names for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_part(folder: Path, prefix: str) -> Labelled:
    images, labels = (_file_in(folder, prefix, rest) for rest in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    if images is None or labels is None:
        missing = "images-idx3-ubyte" if images is None else "labels-idx1-ubyte"
        raise DataError(f"{folder}: {prefix}-{missing} is missing, and {prefix}-{missing}.gz too.")
    source, known = _read_images(images), _read_labels(labels)
    if len(source) != len(known):
        raise DataError(f"{labels}: {len(known)} labels for {len(source)} images. Needs one for each.")
    return Labelled(source, checked_labels(known, _CLASSES, labels))


def _read_images(path: Path) -> Source:
    file = StillFile(path)
    if path.suffix == ".gz":
        return InMemory(str(path), _unpacked(file, axes=3))
    sides, begin = _plain(file, axes=3)
    return Records(file, sides[0], sides[1:], begin=begin)


def _read_labels(path: Path) -> Array:
    file = StillFile(path)
    if path.suffix == ".gz":
        return _unpacked(file, axes=1)
    (count,), begin = _plain(file, axes=1)
    return file.piece(begin, count)


def _plain(file: StillFile, *, axes: int) -> tuple[tuple[int, ...], int]:
    """The sides of the array, and where it begins."""
    begin = 4 + 4 * axes
    sides = _sides(bytes(file.piece(0, min(file.size, begin))), axes, file.path)
    if file.size != begin + math.prod(sides):
        raise DataError(
            f"{file}: {file.size} bytes; its header announces {begin + math.prod(sides)}. It was cut short, or is "
            "damaged."
        )
    return sides, begin


def _unpacked(file: StillFile, *, axes: int) -> Array:
    path = file.path
    with file.opened() as raw, refusing(path, _NEEDED, EOFError, zlib.error), gzip.GzipFile(fileobj=raw) as unpacked:
        stream = cast("BinaryIO", unpacked)
        sides = _sides(stream.read(4 + 4 * axes), axes, path)
        check_unpacked(math.prod(sides), file.size, path, "Unpack it with gunzip: plain files are read from disk.")
        array = np.empty(math.prod(sides), dtype=np.uint8)
        fill_from(stream, array, path)
    return array.reshape(sides)


def _sides(header: bytes, axes: int, path: Path) -> tuple[int, ...]:
    if len(header) != 4 + 4 * axes or header[:4] != bytes((0, 0, 8, axes)):
        raise DataError(f"{path}: does not begin like an IDX file of bytes with {axes} axes. Needs {_NEEDED}.")
    sides = struct.unpack(f">{axes}I", header[4:])
    if not all(sides):
        raise DataError(f"{path}: its header announces no examples. Needs at least one.")
    return sides
