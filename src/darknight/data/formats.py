"""Every format that can be read, and the way from what a user wrote to a dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from darknight.data.cifar import CIFAR10, CIFAR100, has_cifar, read_cifar
from darknight.data.dataset import Dataset, Examples, Unlabelled, narrowed
from darknight.data.digits import read_digits
from darknight.data.files import refusing
from darknight.data.found import LARGEST_IMAGE, UNKNOWN, Found, Labelled
from darknight.data.idx import has_mnist, read_mnist
from darknight.data.normalise import Normalisation, ascending, measured
from darknight.data.npz import read_npz
from darknight.data.pictures import has_pictures, read_pictures
from darknight.data.split import size_of_test, stratified_split
from darknight.data.table import read_table
from darknight.errors import DataError, UsageError

_SEALED = ("manifest.json", "head", "records")  # what `darknight seal` leaves; not for this room to open


@dataclass(frozen=True, kw_only=True)
class Format:
    """argument: what follows the name and a colon; "" for data that comes without a file.

    looks_for: by what a path is recognised, in words; and `recognise`, in code. read(path, image_size, labelled).
    """

    argument: str
    looks_for: str
    recognise: Callable[[Path], bool]
    read: Callable[[Path, int | None, bool], Found]
    resizes: bool = False


# In the order in which a path is tried.
DATASETS: dict[str, Format] = {
    "digits": Format(
        argument="",
        looks_for="",
        recognise=lambda path: False,
        read=lambda path, size, labelled: read_digits(),
    ),
    "cifar10": Format(
        argument="FOLDER",
        looks_for="data_batch_1 and test_batch, or both with .bin",
        recognise=lambda path: has_cifar(path, CIFAR10),
        read=lambda path, size, labelled: read_cifar(path, CIFAR10),
    ),
    "cifar100": Format(
        argument="FOLDER",
        looks_for="files train and test, or both with .bin",
        recognise=lambda path: has_cifar(path, CIFAR100),
        read=lambda path, size, labelled: read_cifar(path, CIFAR100),
    ),
    "fashion-mnist": Format(
        argument="FOLDER",
        looks_for="train-images-idx3-ubyte or the same with .gz, and 'fashion' in the folder's name",
        recognise=lambda path: has_mnist(path) and "fashion" in path.absolute().as_posix().lower(),
        read=lambda path, size, labelled: read_mnist(path, fashion=True),
    ),
    "mnist": Format(
        argument="FOLDER",
        looks_for="train-images-idx3-ubyte or the same with .gz",
        recognise=has_mnist,
        read=lambda path, size, labelled: read_mnist(path, fashion=False),
    ),
    "folder": Format(
        argument="PATH",
        looks_for="folders train and val, or one folder of pictures for each class",
        recognise=lambda path: path.is_dir() and has_pictures(path),
        read=lambda path, size, labelled: read_pictures(path, size, labelled=labelled),
        resizes=True,
    ),
    "npz": Format(
        argument="FILE",
        looks_for="a file that ends in .npz",
        recognise=lambda path: path.is_file() and path.suffix.lower() == ".npz",
        read=lambda path, size, labelled: read_npz(path, labelled=labelled),
    ),
    "csv": Format(
        argument="FILE",
        looks_for="a file that ends in .csv or .tsv",
        recognise=lambda path: path.is_file() and path.suffix.lower() in (".csv", ".tsv"),
        read=lambda path, size, labelled: read_table(path),
    ),
}


def read_dataset(source: str, *, seed: int, test_share: float | None = None, image_size: int | None = None) -> Dataset:
    """The dataset that `source` names: "digits", "cifar10:FOLDER" and so on, or a path whose format is recognised.

    Where the files have no test part, `test_share` of the examples (a fifth, unless told) are set apart by `seed`,
    every class in its proportion. Examples are normalised by the training part, pictures in folders by ImageNet's
    constants. image_size: to which pictures in folders are scaled.
    """
    return _dataset(_found(source, image_size, labelled=True), seed, test_share)


def read_either(
    source: str, *, seed: int, test_share: float | None = None, image_size: int | None = None
) -> Dataset | Unlabelled:
    """What `read_dataset` reads; or, where labels are missing (pictures in one folder, an npz without y), all examples.

    Those are not normalised, but by the model that gets them, and nothing is set apart.
    """
    found = _found(source, image_size, labelled=False)
    parts = [part for part in (found.train, found.test) if part is not None]
    if all(int(part.labels.min()) != UNKNOWN for part in parts):
        return _dataset(found, seed, test_share)
    if test_share is not None:
        raise UsageError(f"{found.name}: without labels nothing is set apart for testing. Leave out the test share.")
    *train, test = (_part(part, None, Normalisation.none(part.source.shape[0])) for part in parts)
    return Unlabelled(found.name, train[0] if train else None, test, found.classes, found.label_names or None)


def _dataset(found: Found, seed: int, test_share: float | None) -> Dataset:
    if found.test is not None and test_share is not None:
        raise UsageError(f"{found.name} has a test part of its own. Leave out the test share.")
    labels = found.train.labels
    chosen = _all_of(found.train)
    test, chosen_test = found.test, None
    if test is None:
        count = size_of_test(len(labels), test_share, found.name)
        chosen, chosen_test = (narrowed(each.numpy()) for each in stratified_split(labels, count, seed=seed))
        test = found.train
    normalisation = found.normalisation or measured(found.train.source, chosen)
    return Dataset(
        found.name,
        _part(found.train, chosen, normalisation),
        _part(test, chosen_test, normalisation),
        found.classes,
        found.label_names,
        normalisation,
        found.augmentation,
    )


def read_examples(
    source: str,
    *,
    normalisation: Normalisation,
    label_names: tuple[str, ...] | None = None,
    image_size: int | None = None,
) -> Examples:
    """Examples for a trained model: the test part of `source` if it has one, else all of it, normalised as told.

    Labels may be missing (pictures in one folder, an npz without y), and are -1 then. Where both the files and the
    model name the classes, the labels are the numbers of the model's `label_names`.
    """
    found = _found(source, image_size, labelled=False)
    part = found.test or found.train
    channels = part.source.shape[0]
    if channels != len(normalisation.mean):
        raise DataError(
            f"{found.name}: examples of shape {part.source.shape}; the model was trained on {len(normalisation.mean)} "
            "channels or columns."
        )
    labels = labels_for(label_names, part.labels, found.label_names, found.name)
    return _part(Labelled(part.source, labels), None, normalisation)


def labels_for(wanted: tuple[str, ...] | None, labels: Tensor, names: tuple[str, ...] | None, where: str) -> Tensor:
    """Labels by the numbers of a model, whose classes are `wanted`, where both it and the data have `names`."""
    if wanted is None or not names:
        return labels
    number = {name: at for at, name in enumerate(wanted)}
    if not set(names) <= number.keys():
        raise DataError(f"{where}: some of the classes are none of the model's. Use the same names.")
    translated = torch.tensor([number[name] for name in names])
    return torch.where(labels == UNKNOWN, UNKNOWN, translated[labels])


def _part(part: Labelled, chosen: Tensor | None, normalisation: Normalisation) -> Examples:
    if chosen is None:
        chosen = _all_of(part)
    everything = len(chosen) == len(part.labels) and ascending(chosen)
    labels = part.labels if everything else torch.from_numpy(part.labels.numpy()[chosen.numpy()])
    return Examples(part.source, chosen, labels, normalisation)


def _all_of(part: Labelled) -> Tensor:
    return torch.from_numpy(np.arange(len(part.labels), dtype=np.int32 if len(part.labels) < 1 << 31 else np.int64))


def _found(source: str, image_size: int | None, *, labelled: bool) -> Found:
    if image_size is not None and not 1 <= image_size <= LARGEST_IMAGE:
        raise UsageError(f"image size {image_size}; needs a whole number from 1 to {LARGEST_IMAGE}.")
    name, path = _recognised(source, labelled)
    form = DATASETS[name]
    with refusing(path, f"data in the format {name!r}"):
        found = form.read(path, image_size, labelled)
    sides = found.train.source.shape[1:]
    if image_size is not None and not form.resizes and sides != (image_size, image_size):
        raise UsageError(f"only pictures in folders are scaled; {found.name} has {sides}. Leave out the image size.")
    return found


def _recognised(source: str, labelled: bool) -> tuple[str, Path]:
    """The format's name and the path."""
    name, colon, argument = source.partition(":")
    if name in DATASETS:
        form = DATASETS[name]
        if bool(argument) != bool(form.argument) or (colon and not form.argument):
            written = f"{name}:{form.argument}" if form.argument else name
            raise UsageError(f"data {source!r}; write {written}, or ./{name} for a path of that name.")
        return name, Path(argument)
    path = Path(source)
    with refusing(path, "data that can be read"):
        if not path.exists() and (path.suffix or "/" in source):
            raise UsageError(f"{source}: there is no file or folder of that name. Check the path; or {_known()}")
        if not source or not path.exists():
            raise UsageError(f"unknown data {source!r}; {_known()} There is no file or folder of that name either.")
        for name, form in DATASETS.items():
            if form.recognise(path):
                return name, path
        if all((path / name).is_file() for name in _SEALED):
            raise UsageError(
                f"{source}: a sealed set, which an enclave opens: darknight submit. Give the files that were sealed."
            )
        if not labelled and path.is_dir():
            return "folder", path
    looked = "; ".join(f"{name}: {form.looks_for}" for name, form in DATASETS.items() if form.looks_for)
    raise UsageError(f"{source}: its format is not known. Looked for {looked}. Or say which it is: {_known()}")


def _known() -> str:
    plain = ", ".join(name for name, form in DATASETS.items() if not form.argument)
    placed = ", ".join(f"{name}:{form.argument}" for name, form in DATASETS.items() if form.argument)
    return f"use one of {plain}. Or {placed}."
