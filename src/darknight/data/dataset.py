"""What every reader returns: images and labels in memory, split and normalised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images for training and for testing; x is (example, channel, height, width), y is (example,)."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            where = f"{self.name}, {part} part"
            if x.ndim != 4 or y.shape != x.shape[:1] or not len(x):
                raise DataError(
                    f"{where}: images of shape {tuple(x.shape)} with labels of shape {tuple(y.shape)}; needs at least "
                    "one image, (example, channel, height, width), and one label for each."
                )
            if not x.is_floating_point() or y.dtype != torch.int64:
                raise DataError(f"{where}: images are {x.dtype} and labels {y.dtype}; needs floats and torch.int64.")
            if not bool(x.isfinite().all()):
                raise DataError(f"{where}: some values are NaN or infinite. Clean the data.")
            if int(y.min()) < 0 or int(y.max()) >= self.classes:
                raise DataError(f"{where}: some labels are outside 0 to {self.classes - 1}. Relabel them.")
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise DataError(
                f"{self.name}: training images are {tuple(self.train_x.shape[1:])} and test images "
                f"{tuple(self.test_x.shape[1:])}; they must have one shape."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        channels, height, width = self.train_x.shape[1:]
        return channels, height, width


def stratified_split(labels: Tensor, test_examples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of training and of test examples, shuffled, with every class in the test part in its proportion.

    The test part has exactly `test_examples`: whole shares first, then one more for the classes whose share was cut
    the most.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    counts = torch.bincount(labels)
    quotas = counts * test_examples / len(labels)
    taken = quotas.floor().to(torch.int64)
    missing = test_examples - int(taken.sum())
    taken[(quotas - taken).argsort(descending=True, stable=True)[:missing]] += 1
    in_test = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in enumerate(taken.tolist()):
        in_test[order[labels[order] == label][:count]] = True
    return order[~in_test[order]], order[in_test[order]]
