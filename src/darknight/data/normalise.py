"""Normalisation: every channel of an image, every column of a table, to mean 0 and deviation 1 of the training part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darknight.data.source import Source
from darknight.errors import DataError

# Where a batch ends decides the last bit of the result. Bytes are read in pieces of a batch, floats become float64: so
# only a few MiB are needed at once.
_BATCH_BYTES, _PIECES = 4 << 20, 32
_BATCH_FLOATS = 1 << 17


@dataclass(frozen=True)
class Normalisation:
    """x -> (x - mean) / std, for each channel or column. Bytes are taken as 0 to 1 first, that is, divided by 255.

    A trained model needs the same numbers again: they are plain floats, ready for JSON.

    >>> halves = Normalisation(mean=(0.5,), std=(0.25,))
    >>> halves(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-2.,  2.]]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        # From JSON they come as lists.
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))
        if not self.mean or len(self.mean) != len(self.std):
            raise DataError(f"a normalisation of {len(self.mean)} means and {len(self.std)} deviations; needs as many.")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise DataError("a normalisation needs finite means and deviations, and these above 0.")

    @classmethod
    def none(cls, channels: int) -> Normalisation:
        """For examples whose model will say how they are normalised."""
        return cls(mean=(0.0,) * channels, std=(1.0,) * channels)

    def __call__(self, raw: Tensor) -> Tensor:
        """(example, channel, ...), bytes or floats -> float32 in new memory. float64 is rounded only at the end."""
        if raw.ndim < 2 or raw.shape[1] != len(self.mean):
            raise DataError(
                f"examples of shape {tuple(raw.shape[1:])} for a normalisation of {len(self.mean)} channels or columns."
            )
        dtype = torch.float64 if raw.dtype == torch.float64 else torch.float32
        view = (1, -1, *[1] * (raw.ndim - 2))
        mean, std = (torch.tensor(values, dtype=dtype).view(view) for values in (self.mean, self.std))
        x = raw.to(dtype, copy=True)
        if raw.dtype == torch.uint8:
            x.div_(255)
        return x.sub_(mean).div_(std).to(torch.float32)


# The customary constants of ImageNet, for folders of photographs: measuring would decode every file once more, and
# published weights expect these.
IMAGENET = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def measured(source: Source, chosen: Tensor) -> Normalisation:
    """Mean and deviation of the `chosen` examples, in one pass in the order of the file.

    The result depends on the values alone, not on threads: bytes are summed as integers, other numbers by NumPy, which
    uses one thread, with batches combined as in Chan, Golub and LeVeque (1979). A constant channel has deviation 1.
    """
    order = chosen if ascending(chosen) else torch.from_numpy(np.sort(chosen.numpy()))
    as_bytes = source.read(order[:1].to(torch.int64)).dtype == torch.uint8
    batch = max(1, (_BATCH_BYTES if as_bytes else _BATCH_FLOATS) // math.prod(source.shape))
    moments = _Moments(source.shape[0])
    for indices in torch.split(order, batch):
        if as_bytes:
            moments.add_bytes(_pixels(source, piece) for piece in torch.split(indices, -(-batch // _PIECES)))
            continue
        raw = _pixels(source, indices)
        if not np.isfinite(raw).all():
            raise DataError(f"{bad_place(source, indices, torch.from_numpy(raw))}: some values are NaN or infinite.")
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below
            moments.add(raw)
    if not np.isfinite(moments.squares).all():
        raise DataError(f"{source.place(0)} and others: values so large that they have no deviation. Rescale them.")
    return moments.normalisation(255.0 if as_bytes else 1.0)


def _pixels(source: Source, indices: Tensor) -> NDArray[Any]:
    """(example, channel, pixel)."""
    return source.read(indices.to(torch.int64)).numpy().reshape(len(indices), source.shape[0], -1)


def ascending(numbers: Tensor) -> bool:
    """Then there is nothing to sort or to copy, which takes more memory than all the rest if there are millions."""
    values = numbers.numpy()
    return bool((values[1:] > values[:-1]).all())


def bad_place(source: Source, indices: Tensor, examples: Tensor) -> str:
    """Where the first of the `examples` with a value that is not finite came from."""
    finite = examples.isfinite().flatten(1).all(dim=1)
    return source.place(int(indices[int((~finite).nonzero()[0, 0])]))


class _Moments:
    """Count, mean, and sum of squared deviations of each channel so far."""

    def __init__(self, channels: int) -> None:
        self.count = 0
        self.mean = np.zeros(channels)
        self.squares = np.zeros(channels)

    def add_bytes(self, pieces: Iterable[NDArray[np.uint8]]) -> None:
        """Each (example, channel, pixel)."""
        count, total, of_squares = 0, np.zeros_like(self.mean, np.int64), np.zeros_like(self.mean, np.int64)
        for values in pieces:
            count += values.shape[0] * values.shape[2]
            total += values.sum(axis=2, dtype=np.int64).sum(axis=0)
            of_squares += np.multiply(values, values, dtype=np.uint16).sum(axis=2, dtype=np.int64).sum(axis=0)
        mean = total / count
        self._combine(count, mean, np.maximum(of_squares - total * mean, 0.0))

    def add(self, values: NDArray[np.floating[Any]]) -> None:
        """(example, channel, pixel)."""
        wide = values.astype(np.float64)
        mean = wide.mean(axis=2).mean(axis=0)
        wide -= mean[:, None]
        squares = np.square(wide, out=wide).sum(axis=2).sum(axis=0)
        self._combine(values.shape[0] * values.shape[2], mean, squares)

    def _combine(self, count: int, mean: NDArray[np.float64], squares: NDArray[np.float64]) -> None:
        both = self.count + count
        away = mean - (self.mean if self.count else mean)
        self.squares += squares + away * away * (self.count * count / both)
        self.mean = mean - away * (self.count / both)
        self.count = both

    def normalisation(self, unit: float) -> Normalisation:
        std = np.sqrt(self.squares / self.count)
        # Below the rounding of the mean itself, a deviation is that of a constant.
        std[std <= np.abs(self.mean) * 1e-14] = unit
        return Normalisation(tuple((self.mean / unit).tolist()), tuple((std / unit).tolist()))
