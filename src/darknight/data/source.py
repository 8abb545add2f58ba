"""Examples as files hold them, before they are normalised: in memory, as records of a file, or several of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darknight.data.files import StillFile

Array = NDArray[Any]


class Source(Protocol):
    """Examples by number. `shape` is (channels, height, width) for images and (columns,) for tables."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """(example, *shape), uint8, float32 or float64, in the order of `indices` (int64, all within the length)."""
        ...

    def place(self, index: int) -> str:
        """Where an example is, for people: the file, and the number in it where it holds several."""
        ...


@dataclass(frozen=True, eq=False)
class InMemory:
    """An array whose first axis counts examples. where: the file it came from."""

    where: str
    array: Array
    channels_last: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape(self.array.shape[1:], self.channels_last)

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: Tensor) -> Tensor:
        return _tensor(self.array[indices.numpy()], self.channels_last)

    def place(self, index: int) -> str:
        return f"{self.where}, example {index}"


@dataclass(frozen=True, eq=False)
class Records:
    """Examples of one size, one behind the other in a file, read when they are asked for.

    begin: place of the first record; skip: bytes of a record in front of the example (labels, as a rule).
    """

    file: StillFile
    count: int
    stored_shape: tuple[int, ...]
    begin: int = 0
    skip: int = 0
    dtype: np.dtype[Any] = field(default=np.dtype(np.uint8))
    channels_last: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape(self.stored_shape, self.channels_last)

    @property
    def stride(self) -> int:
        return self.skip + math.prod(self.stored_shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Tensor) -> Tensor:
        raw = self.file.records(indices.numpy(), begin=self.begin, stride=self.stride)
        examples = np.ascontiguousarray(raw[:, self.skip :]).view(self.dtype)
        return _tensor(examples.reshape(-1, *self.stored_shape), self.channels_last)

    def place(self, index: int) -> str:
        return f"{self.file}, example {index}"


class Joined:
    """Several sources of one shape as one, in their order."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self._ends = np.cumsum([len(source) for source in sources])
        self.shape = sources[0].shape

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Tensor) -> Tensor:
        numbers = indices.numpy()
        owners = np.searchsorted(self._ends, numbers, side="right")
        asked = np.unique(owners).tolist() or [0]
        if len(asked) == 1:
            only: Source = self._sources[asked[0]]
            return only.read(torch.from_numpy(numbers - self._begin(asked[0])))
        out: Array | None = None
        for owner in asked:
            here = np.flatnonzero(owners == owner)
            found = self._sources[owner].read(torch.from_numpy(numbers[here] - self._begin(owner))).numpy()
            if out is None:
                out = np.empty((len(numbers), *self.shape), dtype=found.dtype)
            out[here] = found
        assert out is not None
        return torch.from_numpy(out)

    def place(self, index: int) -> str:
        owner = int(np.searchsorted(self._ends, index, side="right"))
        return self._sources[owner].place(index - self._begin(owner))

    def _begin(self, owner: int) -> int:
        return int(self._ends[owner]) - len(self._sources[owner])


def _shape(stored: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """An image without an axis for channels has one channel."""
    if len(stored) == 2:
        return 1, *stored
    return (stored[2], *stored[:2]) if channels_last else stored


def _tensor(examples: Array, channels_last: bool) -> Tensor:
    """uint8 and floats as they are, in this machine's byte order and channels first; other integers as float64."""
    if examples.dtype.kind != "f" and examples.dtype != np.uint8:
        examples = examples.astype(np.float64)
    elif not examples.dtype.isnative:
        examples = examples.astype(examples.dtype.newbyteorder("="))
    if examples.ndim == 3:
        examples = examples[:, None]
    x = torch.from_numpy(examples)
    return (x.permute(0, 3, 1, 2) if channels_last else x).contiguous()
