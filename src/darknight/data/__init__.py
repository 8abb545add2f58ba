"""Datasets that the command knows by name.

>>> sorted(DATASETS)
['digits']
"""

from __future__ import annotations

from collections.abc import Callable

from darknight.data.dataset import Dataset
from darknight.data.digits import read_digits
from darknight.errors import UsageError

# name -> reader, called with the seed of the split.
DATASETS: dict[str, Callable[[int], Dataset]] = {"digits": read_digits}


def read_dataset(name: str, *, seed: int) -> Dataset:
    """The dataset called `name`, split into training and test examples by `seed`."""
    reader = DATASETS.get(name)
    if reader is None:
        raise UsageError(f"unknown data {name!r}; use one of {', '.join(sorted(DATASETS))}.")
    return reader(seed)


__all__ = ["DATASETS", "Dataset", "read_dataset", "read_digits"]
