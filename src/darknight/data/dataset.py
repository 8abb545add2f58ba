"""What every reader returns: examples for training and for testing, read when they are asked for, and their labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darknight.data.augment import Augmentation
from darknight.data.found import UNKNOWN
from darknight.data.normalise import Normalisation, bad_place
from darknight.data.source import Source
from darknight.errors import DataError, UsageError

_WHOLE_LIMIT = 1 << 30


class Part(Protocol):
    """Examples with their labels. Labels are in memory, int64; examples may be on disk."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example: (channels, height, width), or (columns,) for a table."""
        ...

    def __len__(self) -> int: ...

    def examples(self, indices: Tensor) -> Tensor:
        """(example, *shape), float32, normalised and finite, in the order of `indices` (int64)."""
        ...


@dataclass(frozen=True, eq=False)
class Tensors:
    """A part in memory: x is (example, *shape), normalised by whoever made it; labels is (example,)."""

    x: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if not self.x.is_floating_point():
            raise DataError(f"examples are {self.x.dtype}; needs floats.")
        if not bool(self.x.isfinite().all()):
            raise DataError("examples: some values are NaN or infinite. Clean the data.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def __len__(self) -> int:
        return len(self.x)

    def examples(self, indices: Tensor) -> Tensor:
        return self.x[checked_indices(indices, len(self))]


@dataclass(frozen=True, eq=False)
class Examples:
    """A part of a source: the examples numbered `chosen` there (int64, or `narrowed`), normalised as they are read."""

    source: Source
    chosen: Tensor
    labels: Tensor
    normalisation: Normalisation

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def __len__(self) -> int:
        return len(self.chosen)

    def examples(self, indices: Tensor) -> Tensor:
        numbers = self.chosen[checked_indices(indices, len(self))].to(torch.int64)
        x = self.normalisation(self.source.read(numbers))
        if not bool(x.isfinite().all()):
            raise DataError(f"{bad_place(self.source, numbers, x)}: some values are NaN or infinite. Clean the data.")
        return x

    def place(self, index: int) -> str:
        """Where an example came from: its file, and its number there."""
        return self.source.place(int(self.chosen[index]))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled examples for training and for testing.

    label_names: of the classes, in their order, where the files have names.
    normalisation: what was done to each example, for whoever uses the trained model; None: not known.
    augmentation: what is usual in training on such images; None: nothing is.
    """

    name: str
    train: Part
    test: Part
    classes: int
    label_names: tuple[str, ...] | None = None
    normalisation: Normalisation | None = None
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        for part, where in ((self.train, "train"), (self.test, "test")):
            _check_part(part, f"{self.name}, {where} part", self.classes, least=0)
        _check_together(self.name, self.train, self.test, self.classes, self.label_names)

    def __len__(self) -> int:
        return len(self.train) + len(self.test)

    @property
    def labelled(self) -> int:
        """How many have a label: all of them, which `Unlabelled` does not promise."""
        return len(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, height, width) of one image, or (columns,) of one row."""
        return self.train.shape

    @cached_property
    def train_x(self) -> Tensor:
        """All training examples at once, for sets that fit in memory."""
        return self._whole(self.train)

    @property
    def train_y(self) -> Tensor:
        return self.train.labels

    @cached_property
    def test_x(self) -> Tensor:
        """All test examples at once, for sets that fit in memory."""
        return self._whole(self.test)

    @property
    def test_y(self) -> Tensor:
        return self.test.labels

    def _whole(self, part: Part) -> Tensor:
        if isinstance(part, Tensors):
            return part.x
        nbytes = len(part) * math.prod(part.shape) * 4
        if nbytes > _WHOLE_LIMIT:
            raise UsageError(
                f"{self.name}: {nbytes} bytes are too many to keep at once (at most {_WHOLE_LIMIT}). Read batches, "
                "with examples(indices)."
            )
        return part.examples(torch.arange(len(part)))


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Examples for a trained model, of which some or all have no label: nothing can be trained on them.

    train: None where the files have one part; it is `test` then, whatever it was meant for.
    """

    name: str
    train: Part | None
    test: Part
    classes: int
    label_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for part, where in self._parts:
            _check_part(part, f"{self.name}, {where} part", self.classes, least=UNKNOWN)
        _check_together(self.name, self.train or self.test, self.test, self.classes, self.label_names)
        if self.labelled == len(self):
            raise DataError(f"{self.name}: every example has a label. Make it a Dataset.")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.test.shape

    @property
    def labelled(self) -> int:
        """How many have a label all the same."""
        return sum(int((part.labels.numpy() != UNKNOWN).sum()) for part, _ in self._parts)

    def __len__(self) -> int:
        return sum(len(part) for part, _ in self._parts)

    @property
    def _parts(self) -> list[tuple[Part, str]]:
        return [(part, name) for part, name in ((self.train, "train"), (self.test, "test")) if part is not None]


def _check_part(part: Part, where: str, classes: int, *, least: int) -> None:
    """Of one shape that models take, with a label from `least` on for each example."""
    labels = part.labels
    if len(part.shape) not in (1, 3) or math.prod(part.shape) < 1:
        raise DataError(f"{where}: examples of shape {part.shape}; needs (channels, height, width) or (columns,).")
    if labels.shape != (len(part),) or not len(part):
        raise DataError(
            f"{where}: {len(part)} examples with labels of shape {tuple(labels.shape)}; needs at least one "
            "example, and one label for each."
        )
    if labels.dtype != torch.int64:
        raise DataError(f"{where}: labels are {labels.dtype}; needs torch.int64.")
    numbers = labels.numpy()
    if int(numbers.min()) < least or int(numbers.max()) >= classes:
        raise DataError(f"{where}: some labels are outside 0 to {classes - 1}. Relabel them.")


def _check_together(name: str, train: Part, test: Part, classes: int, label_names: tuple[str, ...] | None) -> None:
    if train.shape != test.shape:
        raise DataError(
            f"{name}: training examples are {train.shape} and test examples {test.shape}; they must have one shape."
        )
    if label_names is not None and len(label_names) != classes:
        raise DataError(f"{name}: {len(label_names)} names for {classes} classes; needs one for each.")


def narrowed(numbers: NDArray[Any]) -> Tensor:
    """Numbers of examples in half the memory, where none is too large for that."""
    small = len(numbers) == 0 or int(numbers.max()) < 1 << 31
    return torch.from_numpy(numbers.astype(np.int32 if small else np.int64))


def checked_indices(indices: Tensor, length: int) -> Tensor:
    """Numbers of examples, as they are, or IndexError: a file has no example -1."""
    if indices.dtype != torch.int64 or indices.ndim != 1:
        raise IndexError(f"indices are {indices.dtype} of shape {tuple(indices.shape)}; needs one axis of torch.int64.")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < length:
        raise IndexError(f"some indices are outside 0 to {length - 1}.")
    return indices
