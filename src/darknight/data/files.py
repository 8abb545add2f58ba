"""Files that are read piece by piece, and what a reader says when one is not what it should be.

Guarantees: a StillFile is opened anew for every read and closed again, and a file that was changed or replaced since
it was first seen is an error, so two epochs see the same examples. Nothing is mapped into memory: a mapped file that
somebody shortens ends the process, and an enclave would load it whole. Contract tests:
tests/data/test_cifar.py::test_a_file_that_changes_during_training_is_noticed, tests/data/test_streaming.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from darknight.errors import DarKnightError, DataError

# What has to be unpacked in memory (compressed arrays, tables) may take this much. More must come uncompressed, and is
# then read from disk batch by batch.
MEMORY_LIMIT = 2 << 30
# DEFLATE packs at most 1,032 bytes into one; a file that claims more lies about its size.
DEFLATE_RATIO = 1032

Stamp = tuple[int, int, int, int]


@contextmanager
def refusing(place: str | Path, needed: str, *decoder: type[Exception]) -> Iterator[None]:
    """Turn errors of the file system, and those that a `decoder` of a foreign format raises, into a DataError.

    Our own mistakes pass, where the decoder's errors are known by name, and so do DarKnight's errors.
    """
    try:
        yield
    except DarKnightError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{place}: there is no such file. Needs {needed}.") from error
    except MemoryError as error:
        raise DataError(f"{place}: does not fit in the memory of this process. Needs {needed}.") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{place}: cannot be read ({reason}). Needs {needed}.") from error
    except decoder as error:
        raise DataError(f"{place}: is damaged or of another kind ({type(error).__name__}). Needs {needed}.") from error


class StillFile:
    """A regular file that must stay as it is while it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with refusing(path, "a file that can be read"):
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise DataError(f"{path}: is not a regular file. Needs a file with data.")
            with open(path, "rb"):  # a file without permission is refused here and not in the middle of a training
                pass
        self.size = found.st_size
        self._stamp = _stamp(found)

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def opened(self, *, buffered: bool = False) -> Iterator[BinaryIO]:
        """The file from its beginning; closed afterwards."""
        with refusing(self.path, "a file that can be read"):
            file: BinaryIO = open(self.path, "rb") if buffered else open(self.path, "rb", buffering=0)  # noqa: SIM115
        with file:
            if _stamp(os.fstat(file.fileno())) != self._stamp:
                raise DataError(f"{self.path}: was changed since it was first read. Start again, and leave it alone.")
            yield file

    def piece(self, begin: int, length: int) -> NDArray[np.uint8]:
        """`length` bytes from `begin` on."""
        return self.records(np.zeros(1, dtype=np.int64), begin=begin, stride=length).reshape(length)

    def records(self, numbers: NDArray[np.int64], *, begin: int, stride: int) -> NDArray[np.uint8]:
        """Records of `stride` bytes each, the first one at `begin`: (record, byte), in the order of `numbers`."""
        out = np.empty(len(numbers) * stride, dtype=np.uint8)
        with self.opened() as file, refusing(self.path, "a file that can be read"):
            for first, last in _runs(numbers):
                file.seek(begin + int(numbers[first]) * stride)
                self._fill(file, out[first * stride : last * stride].data)
        return out.reshape(len(numbers), stride)

    def _fill(self, file: BinaryIO, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            count = file.readinto(buffer[filled:])  # type: ignore[attr-defined]
            if not count:
                raise DataError(f"{self.path}: ends too early. It was cut short while it was read.")
            filled += count


def fill_from(stream: BinaryIO, out: NDArray[np.uint8], place: str | Path) -> None:
    """Fill `out` from a stream that must end exactly there. Pages are touched as data comes, never ahead of it."""
    view, filled = out.data, 0
    while filled < len(view):
        count = stream.readinto(view[filled : filled + (1 << 20)])  # type: ignore[attr-defined]
        if not count:
            raise DataError(f"{place}: ends after {filled} of the {len(view)} bytes that its header announces.")
        filled += count
    if stream.read(1):
        raise DataError(f"{place}: goes on after the {len(view)} bytes that its header announces.")


def check_unpacked(nbytes: int, packed: int, place: str | Path, remedy: str) -> None:
    """Refuse to make room for `nbytes` that cannot be there, or are too many to keep in memory."""
    if nbytes > packed * DEFLATE_RATIO:
        raise DataError(f"{place}: announces {nbytes} bytes, which {packed} compressed ones cannot hold.")
    if nbytes > MEMORY_LIMIT:
        raise DataError(f"{place}: {nbytes} bytes when unpacked; at most {MEMORY_LIMIT} are. {remedy}")


def _runs(numbers: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Begin and end of each stretch of consecutive numbers, so that neighbours are read at once."""
    if not len(numbers):
        return
    edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    yield from pairwise(edges)


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
