"""Datasets: readers for the formats that people have, splits, normalisation, augmentation.

>>> list(DATASETS)
['digits', 'cifar10', 'cifar100', 'fashion-mnist', 'mnist', 'folder', 'npz', 'csv']

`read_dataset` reads one for training. Labels are in memory; examples are read from disk when a batch is asked for,
where the format allows it (CIFAR, plain IDX, uncompressed npz, pictures), so a set may be larger than memory. Nothing
is unpickled, and a file that is damaged, cut short or of another kind is a DataError with its name.
"""

from __future__ import annotations

from darknight.data.augment import Augmentation
from darknight.data.dataset import Dataset, Examples, Part, Tensors, Unlabelled
from darknight.data.formats import DATASETS, Format, labels_for, read_dataset, read_either, read_examples
from darknight.data.normalise import IMAGENET, Normalisation
from darknight.data.packing import Packed, pack_dataset, unpack_dataset, unpack_either

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
    "Unlabelled",
    "labels_for",
    "pack_dataset",
    "read_dataset",
    "read_either",
    "read_examples",
    "unpack_dataset",
    "unpack_either",
]
