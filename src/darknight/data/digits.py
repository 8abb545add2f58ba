"""Scikit-learn's digits: 1,797 handwritten digits of 8x8 pixels, which come with the package."""

from __future__ import annotations

import torch

from darknight.data.dataset import Dataset, stratified_split
from darknight.errors import DataError

_TEST_EXAMPLES = 360  # one fifth; 1,437 are left for training


def read_digits(seed: int) -> Dataset:
    """1,437 training and 360 test images of shape 1x8x8, scaled to mean 0 and deviation 1 of the training pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed. Run: pip install scikit-learn"
        ) from error
    images, target = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(target, dtype=torch.int64)
    train, test = stratified_split(y, _TEST_EXAMPLES, seed=seed)
    mean, deviation = x[train].mean(), x[train].std()
    x = (x - mean) / deviation
    return Dataset("digits", x[train], y[train], x[test], y[test], classes=10)
