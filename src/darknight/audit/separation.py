"""Images told apart from their mixtures, by nothing but that images are bounded.

A sum or a difference of images takes a wider range of values than an image does. So where linear algebra leaves images
mixed with each other, the mixtures with the narrowest ranges, for their size, are the images. (Bounded component
analysis; unlike independent component analysis it does not mind that images resemble each other.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ANGLES = 90
_SWEEPS = 6  # of rotations, with more than two mixtures
_SHEARS = 40  # sweeps at most
_HALVINGS = 60
_ENOUGH = 1e-9  # of a range: a sweep that makes it narrower by less is the last


def told_apart(mixtures: Tensor) -> Tensor:
    """(mixture, group, feature) -> as many images for each group: order, sign and brightness stay open.

    mixtures: an invertible matrix times images, the same one for all groups.
    """
    wide = mixtures.to(torch.float64)
    # Without what all groups share, images are as good as independent: that turns the matrix into a rotation, nearly.
    own = (wide - wide.mean(dim=1, keepdim=True)).flatten(1)
    values, vectors = torch.linalg.eigh(own @ own.T)
    white = vectors / values.clamp_min(values.amax() * 1e-15).sqrt()
    return _sheared(_rotated(white.T @ wide.flatten(1))).view(mixtures.shape)


def _rotated(rows: Tensor) -> Tensor:
    """The rotation of the rows that makes them narrowest, one pair after the other."""
    for _ in range(_SWEEPS if len(rows) > 2 else 1):
        for first in range(len(rows)):
            for second in range(first + 1, len(rows)):
                # Beyond a quarter turn only names and signs change.
                turns = [_rotation(math.pi / 2 * step / _ANGLES) @ rows[[first, second]] for step in range(_ANGLES)]
                rows[[first, second]] = min(turns, key=lambda pair: float(_widths(pair).prod()))
    return rows


def _sheared(rows: Tensor) -> Tensor:
    """Rows narrowed by adding multiples of other rows, which changes no volume, until nothing gets narrower."""
    for _ in range(_SHEARS):
        before = _widths(rows)
        for row in range(len(rows)):
            for other in range(len(rows)):
                if other != row:
                    rows[row] = _narrowest(rows[row], rows[other])
        if bool((_widths(rows) > before * (1 - _ENOUGH)).all()):
            break
    return rows


def _narrowest(row: Tensor, other: Tensor) -> Tensor:
    """row + t * other of the smallest width; that is a convex function of t, so where its slope turns is the place."""
    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        mixed = row + middle * other
        slope = other[mixed.argmax()] - other[mixed.argmin()]
        low, high = (middle, high) if slope < 0 else (low, middle)
    return row + (low + high) / 2 * other


def _rotation(angle: float) -> Tensor:
    cosine, sine = math.cos(angle), math.sin(angle)
    return torch.tensor([[cosine, sine], [-sine, cosine]], dtype=torch.float64)


def _widths(rows: Tensor) -> Tensor:
    return rows.amax(dim=1) - rows.amin(dim=1)
