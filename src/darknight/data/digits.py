"""Scikit-learn's digits: 1,797 handwritten digits of 8x8 pixels, which come with the package."""

from __future__ import annotations

import numpy as np

from darknight.data.found import Found, Labelled, checked_labels
from darknight.data.source import InMemory
from darknight.errors import DataError

_CLASSES = 10


def read_digits() -> Found:
    """Images of shape 1x8x8; one fifth of them, 360, are for testing unless another share is wanted."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed. Run: pip install scikit-learn"
        ) from error
    images, target = load_digits(return_X_y=True)
    source = InMemory("digits", np.asarray(images, dtype=np.float32).reshape(-1, 8, 8))
    return Found(
        name="digits",
        train=Labelled(source, checked_labels(target, _CLASSES, "digits")),
        test=None,
        classes=_CLASSES,
        label_names=tuple(map(str, range(_CLASSES))),
    )
