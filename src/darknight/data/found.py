"""What a reader of one format found, before it is split and normalised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from darknight.data.augment import Augmentation
from darknight.data.normalise import Normalisation
from darknight.data.source import Source
from darknight.errors import DataError

UNKNOWN = -1  # the label of an example that has none
MOST_CLASSES = 1 << 20
LARGEST_IMAGE = 4096  # a side, in pixels


@dataclass(frozen=True, eq=False)
class Labelled:
    """Examples and one label for each, int64; UNKNOWN where the files hold none."""

    source: Source
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Found:
    """test: None where the files know no test part. normalisation: the customary one, None to measure it.

    augmentation: what is usual for such images in training.
    """

    name: str
    train: Labelled
    test: Labelled | None
    classes: int
    label_names: tuple[str, ...] | None = None
    normalisation: Normalisation | None = None
    augmentation: Augmentation | None = None


def checked_labels(values: ArrayLike, classes: int | None, place: str | Path) -> Tensor:
    """Labels as int64, each from 0 to `classes` - 1 (None: to any reasonable number)."""
    labels = np.asarray(values)
    most = MOST_CLASSES if classes is None else classes
    if labels.size and (labels.min() < 0 or labels.max() >= most):
        raise DataError(
            f"{place}: some labels are outside 0 to {most - 1}. It is damaged, of another kind, or mislabelled."
        )
    return torch.from_numpy(labels.astype(np.int64))
