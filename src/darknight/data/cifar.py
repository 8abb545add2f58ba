"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), in both forms in which they are published.

python: pickled dictionaries, read without unpickling (pickled.py). binary: one record per image, its label (for
CIFAR-100 the coarse and the fine one, of which the fine one is used) and then 3 x 32 x 32 bytes. Either way the images
stay on disk until they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from darknight.data.augment import Augmentation
from darknight.data.files import StillFile, check_unpacked
from darknight.data.found import Found, Labelled, checked_labels
from darknight.data.pickled import PickledArray, read_pickle
from darknight.data.source import InMemory, Joined, Records
from darknight.errors import DataError

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_RECORDS_AT_ONCE = 128


@dataclass(frozen=True)
class _Kind:
    """One of the two sets. folders: their names after unpacking, below the one that the user gave."""

    name: str
    classes: int
    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: str
    label_key: str
    names: tuple[str, str]  # the file of label names and its key, in the python form
    names_text: str  # the same in the binary form, one name per line
    label_bytes: int


CIFAR10 = _Kind(
    name="cifar10",
    classes=10,
    folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    label_key="labels",
    names=("batches.meta", "label_names"),
    names_text="batches.meta.txt",
    label_bytes=1,
)
CIFAR100 = _Kind(
    name="cifar100",
    classes=100,
    folders=("cifar-100-python", "cifar-100-binary"),
    train=("train",),
    test="test",
    label_key="fine_labels",
    names=("meta", "fine_label_names"),
    names_text="fine_label_names.txt",
    label_bytes=2,
)


def has_cifar(folder: Path, kind: _Kind) -> bool:
    """Are the first training file and the test file there? (A file called train alone could be anything.)"""
    form = _form_in(folder, kind)
    return form is not None and (form[0] / (kind.test + ".bin" * form[1])).is_file()


def read_cifar(folder: Path, kind: _Kind) -> Found:
    """All batches in `folder`, or in the folder below it that the published archive makes."""
    form = _form_in(folder, kind)
    if form is None:
        raise DataError(
            f"{folder}: holds no {kind.train[0]} and no {kind.train[0]}.bin. Needs the unpacked folder of {kind.name}: "
            f"{', '.join((*kind.train, kind.test))}, all of them, or all with .bin."
        )
    folder, binary = form
    read = _read_binary if binary else _read_python
    parts = [read(folder / (name + ".bin" * binary), kind) for name in (*kind.train, kind.test)]
    return Found(
        name=kind.name,
        train=Labelled(
            Joined([part.source for part in parts[:-1]]),
            torch.from_numpy(np.concatenate([part.labels for part in parts[:-1]])),
        ),
        test=parts[-1],
        classes=kind.classes,
        label_names=_names_text(folder, kind) if binary else _names_python(folder, kind),
        augmentation=Augmentation(),
    )


def _form_in(folder: Path, kind: _Kind) -> tuple[Path, bool] | None:
    """The folder with the files, and whether they are binary."""
    for place in (folder, *(folder / name for name in kind.folders)):
        for binary in (False, True):
            if (place / (kind.train[0] + ".bin" * binary)).is_file():
                return place, binary
    return None


# --- binary -----------------------------------------------------------------------------------------------------------
def _read_binary(path: Path, kind: _Kind) -> Labelled:
    file = StillFile(path)
    source = Records(file, 0, _SHAPE, skip=kind.label_bytes)
    count, rest = divmod(file.size, source.stride)
    if rest or not count:
        raise DataError(
            f"{path}: {file.size} bytes are not a whole number of images; {kind.name} has {source.stride} bytes for "
            "each. It was cut short, or is of another kind."
        )
    labels = np.empty(count, dtype=np.uint8)
    for begin in range(0, count, _RECORDS_AT_ONCE):
        numbers = np.arange(begin, min(begin + _RECORDS_AT_ONCE, count))
        labels[numbers] = file.records(numbers, begin=0, stride=source.stride)[:, kind.label_bytes - 1]
    return Labelled(Records(file, count, _SHAPE, skip=kind.label_bytes), checked_labels(labels, kind.classes, path))


def _names_text(folder: Path, kind: _Kind) -> tuple[str, ...] | None:
    path = folder / kind.names_text
    if not path.exists():
        return None
    file = StillFile(path)
    text = bytes(file.piece(0, min(file.size, 1 << 16))).decode("utf-8", errors="replace")
    return _checked_names([line.strip() for line in text.splitlines() if line.strip()], kind, path)


# --- python -----------------------------------------------------------------------------------------------------------
def _read_python(path: Path, kind: _Kind) -> Labelled:
    file = StillFile(path)
    content = _dictionary(file)
    data, labels = content.get("data"), content.get(kind.label_key)
    if not isinstance(data, PickledArray) or data.data is None or not isinstance(labels, list):
        raise DataError(
            f"{path}: holds no 'data' with '{kind.label_key}'. Needs a batch of {kind.name}, python version."
        )
    count = len(labels)
    if data.shape != (count, _PIXELS) or not count:
        raise DataError(
            f"{path}: {count} labels for an array of shape {data.shape}. Needs {_PIXELS} bytes for each label, and at "
            "least one."
        )
    if not all(type(label) is int and 0 <= label < kind.classes for label in labels):
        raise DataError(f"{path}: some labels are not whole numbers from 0 to {kind.classes - 1}. It is damaged.")
    known = torch.tensor(labels, dtype=torch.int64)
    if data.fortran_order:
        # All images of one pixel, then of the next: nothing that could be read one image at a time.
        check_unpacked(data.data.length, data.data.length, path, "Save the array in C order.")
        pixels = file.piece(data.data.begin, data.data.length).reshape(_PIXELS, count).T
        return Labelled(InMemory(str(path), np.ascontiguousarray(pixels).reshape(count, *_SHAPE)), known)
    return Labelled(Records(file, count, _SHAPE, begin=data.data.begin), known)


def _dictionary(file: StillFile) -> Mapping[str, object]:
    """The file's dictionary. Python 2 wrote its keys as bytes."""
    content = read_pickle(file)
    if not isinstance(content, dict):
        raise DataError(f"{file}: holds no dictionary. Needs a file of CIFAR's python version.")
    entries = cast("dict[str | bytes, object]", content)
    return {_text(key): value for key, value in entries.items()}


def _names_python(folder: Path, kind: _Kind) -> tuple[str, ...] | None:
    path = folder / kind.names[0]
    if not path.exists():
        return None
    names = _dictionary(StillFile(path)).get(kind.names[1])
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise DataError(f"{path}: holds no '{kind.names[1]}'. Needs the names of {kind.name}'s classes.")
    return _checked_names([_text(name) for name in names], kind, path)


def _checked_names(names: list[str], kind: _Kind, path: Path) -> tuple[str, ...]:
    if len(names) != kind.classes or len(set(names)) != len(names):
        raise DataError(f"{path}: {len(set(names))} different names. Needs one for each of {kind.classes} classes.")
    return tuple(names)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", errors="replace")
