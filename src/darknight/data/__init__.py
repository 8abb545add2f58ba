"""Datasets: readers for the formats that people have, splits, normalisation, augmentation.

>>> list(DATASETS)
['digits', 'cifar10', 'cifar100', 'fashion-mnist', 'mnist', 'folder', 'npz', 'csv']

`read_dataset` reads one for training. Labels are in memory; examples are read from disk when a batch is asked for,
where the format allows it (CIFAR, plain IDX, uncompressed npz, pictures), so a set may be larger than memory. Nothing
is unpickled, and a file that is damaged, cut short or of another kind is a DataError with its name.
"""

from __future__ import annotations

from darknight.data.augment import Augmentation
from darknight.data.dataset import Dataset, Examples, Part, Tensors
from darknight.data.formats import DATASETS, Format, read_dataset, read_examples
from darknight.data.normalise import IMAGENET, Normalisation
from darknight.data.packing import Packed, pack_dataset, unpack_dataset

__all__ = [
    "DATASETS",
    "IMAGENET",
    "Augmentation",
    "Dataset",
    "Examples",
    "Format",
    "Normalisation",
    "Packed",
    "Part",
    "Tensors",
    "pack_dataset",
    "read_dataset",
    "read_examples",
    "unpack_dataset",
]
