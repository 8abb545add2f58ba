"""A dataset as records of one size and a head, and back, bit by bit.

A record is one example as its files have it, before it is normalised: bytes or floats, little-endian. The head has all
the rest: names, shape, classes, normalisation, augmentation, and for each example its label and the record that it is
in. Records come in an order that the caller chooses, so that the place of one need not say what class it is of.
Where labels are missing they are -1 in the same place: the size of a head does not show whether there are any.

    head = length of the words (8 bytes) || words (JSON) || labels (int32) || records (uint32) || zeros

Both arrays go through the training part first, then the test part. The zeros fill the head up to a multiple of 4 KiB,
which hides how long the names are.

Guarantees: `unpack_dataset` of what `pack_dataset` made gives the same batches, labels, names and numbers as the
dataset that was packed, bit by bit (contract test: tests/data/test_packing.py). So does `unpack_either` where labels
are missing; nothing can be trained on that, and `unpack_dataset` refuses it. A head that does not fit its records is a
DataError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darknight.data.augment import Augmentation
from darknight.data.dataset import Dataset, Examples, Part, Unlabelled, narrowed
from darknight.data.found import LARGEST_IMAGE, MOST_CLASSES
from darknight.data.normalise import Normalisation, bad_place
from darknight.errors import DataError, UsageError, other_format

_LABELLED, _UNLABELLED = 1, 2  # formats of a head: earlier releases know the first
_MOST_EXAMPLES = (1 << 32) - 1
_PADDING = 4096
_BATCH_BYTES = 1 << 18
_AT_ONCE = 1 << 16  # NumPy makes 64 bits of each number that it finds places by
_DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}

Records = NDArray[np.uint8]


class RecordStore(Protocol):
    """Where packed records are read from."""

    @property
    def record_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __str__(self) -> str: ...

    def read(self, numbers: NDArray[np.int64]) -> Records:
        """(record, byte), in the order of `numbers`."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed:
    """A dataset that is ready to be packed: its head, and its records when they are asked for."""

    count: int
    record_bytes: int
    _words: Mapping[str, Any]
    _parts: tuple[Examples, ...]
    _dtypes: tuple[str, ...]
    _order: NDArray[np.uint32]

    @property
    def head(self) -> bytearray:
        """Made anew each time: of millions of examples it is large, and needed once."""
        text = json.dumps(self._words, allow_nan=False).encode()
        begin, count = 8 + len(text), self.count
        head = bytearray(_padded(begin + 8 * count))
        head[:begin] = len(text).to_bytes(8, "big") + text
        labels, places = _arrays(head, begin, count)
        for part, first in self._begins():
            labels[first : first + len(part)] = part.labels.numpy()
        for first in range(0, count, _AT_ONCE):
            some = self._order[first : first + _AT_ONCE]
            places[some] = np.arange(first, first + len(some), dtype=np.uint32)
        return head

    def records(self) -> Iterator[Records]:
        """All of them, a quarter of a MiB at a time, or one, each (record, byte)."""
        together = max(1, _BATCH_BYTES // self.record_bytes)
        for begin in range(0, self.count, together):
            numbers = self._order[begin : begin + together].astype(np.int64)
            out = np.zeros((len(numbers), self.record_bytes), dtype=np.uint8)
            for (part, first), dtype in zip(self._begins(), self._dtypes, strict=True):
                here = np.flatnonzero((numbers >= first) & (numbers < first + len(part)))
                if len(here):
                    raw = _raw(part, numbers[here] - first, dtype)
                    out[here, : raw.shape[1]] = raw
            yield out

    def _begins(self) -> list[tuple[Examples, int]]:
        """Each part, and the number of its first example."""
        ends = accumulate(map(len, self._parts))
        return [(part, end - len(part)) for part, end in zip(self._parts, ends, strict=True)]


def pack_dataset(data: Dataset | Unlabelled, order: NDArray[np.integer[Any]]) -> Packed:
    """order: for each record the number of its example; the test part is counted on after the training part."""
    parts = tuple(_examples(part) for part in (data.train, data.test) if part is not None)
    count = sum(map(len, parts))
    if count > _MOST_EXAMPLES:
        raise UsageError(f"{data.name}: {count} examples; at most {_MOST_EXAMPLES} can be packed. Split the set.")
    if not _each_once(order, count):
        raise UsageError(f"an order of {len(order)} records for {count} examples; needs each example once.")
    dtypes = tuple(map(_dtype_of, parts))
    sizes = [{"examples": len(part), "dtype": dtype} for part, dtype in zip(parts, dtypes, strict=True)]
    usual = data.augmentation if isinstance(data, Dataset) else None
    words = {
        "format": _LABELLED if isinstance(data, Dataset) else _UNLABELLED,
        "name": data.name,
        "shape": data.shape,
        "classes": data.classes,
        "label_names": data.label_names,
        "normalisation": asdict(parts[-1].normalisation),
        "augmentation": None if usual is None else asdict(usual),
        "parts": sizes,
    }
    return Packed(
        count=count,
        record_bytes=math.prod(data.shape) * max(_DTYPES[dtype].itemsize for dtype in dtypes),
        _words=words,
        _parts=parts,
        _dtypes=dtypes,
        _order=order.astype(np.uint32, copy=False),
    )


def unpack_dataset(head: bytes, records: RecordStore) -> Dataset:
    """The dataset whose head this is; its examples are read from `records` as they are asked for.

    One without labels is refused: this is what can be trained on.
    """
    data = unpack_either(head, records)
    if isinstance(data, Unlabelled):
        raise DataError(
            f"{records}: some or all of its examples have no label, and training needs one for each. Seal the data "
            'with labels (an npz with y, a folder of pictures for each class), or predict: kind = "infer".'
        )
    return data


def unpack_either(head: bytes, records: RecordStore) -> Dataset | Unlabelled:
    """What was packed, with labels or without; its examples are read from `records` as they are asked for."""
    try:
        words, labels, places = _taken_apart(head, len(records))
        shape = tuple(words["shape"])
        if not all(type(side) is int and side > 0 for side in shape):
            raise ValueError
        normalisation = Normalisation(**words["normalisation"])
        names, augmentation = words["label_names"], words["augmentation"]
        if names is not None and not all(isinstance(name, str) for name in names):
            raise ValueError
        parts, begin = list[Examples](), 0
        for part in words["parts"]:
            source = _Unpacked(records, shape, part["dtype"])
            if source.example_bytes > records.record_bytes:
                raise ValueError
            here = slice(begin, begin + part["examples"])
            parts.append(Examples(source, places[here], labels[here], normalisation))
            begin += part["examples"]
        names = None if names is None else tuple(names)
        if words["format"] == _UNLABELLED:
            *first, last = parts
            if len(first) > 1:
                raise ValueError
            return Unlabelled(words["name"], first[0] if first else None, last, words["classes"], names)
        train, test = parts
        usual = augmentation and _augmentation(augmentation)
        return Dataset(words["name"], train, test, words["classes"], names, normalisation, usual)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{records}: its head does not describe its records. Seal the data again.") from error


@dataclass(frozen=True, eq=False)
class _Unpacked:
    """Examples of one part, as a Source: numbers are those of the records."""

    records: RecordStore
    shape: tuple[int, ...]
    dtype: str

    def __len__(self) -> int:
        return len(self.records)

    @property
    def example_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def read(self, indices: Tensor) -> Tensor:
        raw = np.ascontiguousarray(self.records.read(indices.numpy())[:, : self.example_bytes])
        stored = raw.view(_DTYPES[self.dtype])
        return torch.from_numpy(stored.astype(stored.dtype.newbyteorder("="), copy=False).reshape(-1, *self.shape))

    def place(self, index: int) -> str:
        return f"{self.records}, record {index}"


def _taken_apart(head: bytes, count: int) -> tuple[Mapping[str, Any], Tensor, Tensor]:
    """Words, labels, and the record of each example, when they fit each other."""
    begin = 8 + int.from_bytes(head[:8], "big")
    words = json.loads(head[8:begin])
    if words["format"] not in (_LABELLED, _UNLABELLED):
        raise DataError(f"the head of the sealed set is of {other_format(words['format'], reads=_UNLABELLED)}.")
    numbers = [part["examples"] for part in words["parts"]]
    if not all(type(number) is int and number > 0 for number in numbers) or sum(numbers) != count:
        raise ValueError
    classes, least = words["classes"], 1 if words["format"] == _LABELLED else 0
    if type(classes) is not int or not least <= classes <= MOST_CLASSES or type(words["name"]) is not str:
        raise ValueError
    end = begin + 8 * count
    if len(head) < end or len(head) != _padded(end) or any(head[end:]):
        raise ValueError
    labels, places = _arrays(head, begin, count)
    if not _each_once(places, count):
        raise ValueError
    return words, torch.from_numpy(labels.astype(np.int64)), narrowed(places)


def _arrays(head: bytes | bytearray, begin: int, count: int) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
    """Labels and records, in the memory of the head."""
    labels = np.frombuffer(head, dtype="<i4", count=count, offset=begin)
    return labels, np.frombuffer(head, dtype="<u4", count=count, offset=begin + 4 * count)


def _padded(size: int) -> int:
    return size + -size % _PADDING


def _each_once(numbers: NDArray[Any], count: int) -> bool:
    if numbers.shape != (count,) or int(numbers.min()) < 0 or int(numbers.max()) >= count:
        return False
    seen = np.zeros(count, dtype=bool)
    for begin in range(0, count, _AT_ONCE):
        seen[numbers[begin : begin + _AT_ONCE]] = True
    return bool(seen.all())


def _augmentation(words: dict[str, Any]) -> Augmentation:
    """Whoever sends a head does not decide how much memory it takes: nothing is padded beyond the largest image."""
    crop = words["resized_crop"]
    sizes = (words["crop_padding"], words["cutout"])
    if not all(type(size) is int and size <= LARGEST_IMAGE for size in sizes) or type(words["flip"]) is not bool:
        raise ValueError
    return Augmentation(**{**words, "resized_crop": None if crop is None else (float(crop[0]), float(crop[1]))})


def _examples(part: Part) -> Examples:
    if not isinstance(part, Examples):
        raise UsageError("only a dataset that was read from files can be packed; save yours as npz and read that.")
    return part


def _dtype_of(part: Examples) -> str:
    return str(part.source.read(part.chosen[:1].to(torch.int64)).dtype).removeprefix("torch.")


def _raw(part: Examples, numbers: NDArray[np.int64], dtype: str) -> Records:
    """(example, byte), as they are in the files. Values that no training could use are refused here, early."""
    indices = torch.from_numpy(part.chosen.numpy()[numbers].astype(np.int64))
    x = part.source.read(indices)
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise DataError(f"{bad_place(part.source, indices, x)}: some values are NaN or infinite. Clean the data.")
    stored = x.numpy().astype(_DTYPES[dtype], copy=False)
    return np.ascontiguousarray(stored).reshape(len(numbers), -1).view(np.uint8)
