"""A dataset becomes a folder that anybody may store, and a key file that the data holder keeps.

Guarantees: the folder is there complete or not at all: it is written under another name, and gets its own when
everything, the key file too, is on the disk. A crash, Ctrl-C or a full disk leaves neither, and nothing is ever
overwritten (contract tests: tests/client/test_crashes.py). Neither data nor labels nor names are in the folder in the
clear (contract test: tests/client/test_nothing_in_the_clear.py). The order of the records is drawn afresh: where one is
says nothing about its class or its file (contract test: tests/client/test_seal.py). However large the set is, a few MiB
of it are in memory, where the format can be read like that (contract test: tests/client/test_memory.py).
Leaks: how many examples there are and how large one is, and up to 4 KiB the size of all names together. Whether they
have labels is not among it (contract test: tests/client/test_seal.py).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from darknight.data import Dataset, Unlabelled, pack_dataset, unpack_either
from darknight.errors import DarKnightError, UsageError
from darknight.trust.durable import sync_folder
from darknight.trust.fresh import fresh_order
from darknight.trust.key_file import DataKey, KeyFile, read_key_file, write_key_file
from darknight.trust.sealing import Manifest, SealedRecords, write_sealed

_BATCH_BYTES = 1 << 19

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a sealed set goes, known to be free before any work is done. key: beside the folder, never in it."""

    folder: Path
    key: Path

    def __post_init__(self) -> None:
        folder, key = self.folder.resolve(), self.key.resolve()
        if key == folder or folder in key.parents:
            raise UsageError(
                f"the key in {self.key} would be handed over together with the data in {self.folder}. Keep it "
                "elsewhere."
            )
        for path, what in ((self.folder, "A sealed set is"), (self.key, "A key file is")):
            if os.path.lexists(path):
                raise UsageError(f"{path} is there already. {what} never overwritten: choose another name.")
            if not path.parent.is_dir():
                raise UsageError(f"there is no folder {path.parent}. Make it, or choose another place for {path.name}.")

    @property
    def temporary(self) -> Path:
        """Beside the folder, so that it only needs to be renamed."""
        return self.folder.with_name(f".{self.folder.name}.unfinished")


def key_beside(folder: Path) -> Path:
    """Where the key of a sealed set is, unless it is kept elsewhere."""
    return folder.with_name(f"{folder.name}.key")


def seal_dataset(data: Dataset | Unlabelled, to: Destination, *, progress: Progress) -> Manifest:
    """Seal all examples under a fresh data key. progress: called with how many more are done."""
    packed = pack_dataset(data, fresh_order(len(data)))
    key = DataKey.fresh()

    def records() -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
        for batch in packed.records():
            yield batch
            progress(len(batch))

    with _in_words(to), _workplace(to.temporary) as place:
        manifest = write_sealed(
            place, key, count=packed.count, record_bytes=packed.record_bytes, head=packed.head, records=records()
        )
        # The key first: a folder that looks complete and that nobody can open would be the worse half.
        write_key_file(to.key, KeyFile(key=key, manifest=manifest.digest))
        try:
            if os.path.lexists(to.folder):
                raise FileExistsError(None, "it appeared while it was written", str(to.folder))
            place.rename(to.folder)
            sync_folder(to.folder.parent)
        except BaseException:
            if place.exists():  # otherwise the folder has its name, and needs its key
                to.key.unlink(missing_ok=True)
            raise
    return manifest


def verify_sealed(records: SealedRecords, *, progress: Progress) -> Dataset | Unlabelled:
    """Open every record and the head; TrustError if one is not as it was sealed. What comes back is what is there."""
    data = unpack_either(records.head, records)
    together = max(1, _BATCH_BYTES // records.record_bytes)
    for begin in range(0, len(records), together):
        numbers = np.arange(begin, min(begin + together, len(records)))
        records.read(numbers)
        progress(len(numbers))
    return data


def open_with(folder: Path, key_file: Path) -> SealedRecords:
    """The sealed set in `folder`; it must be the one that the key was made for."""
    found = read_key_file(key_file)
    return SealedRecords(folder, found.key, manifest=found.manifest)


@contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """A folder for one process at a time; what a killed one left in it is removed, and so is what a failure leaves."""
    path.mkdir(exist_ok=True)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{path} is in use by another sealing. Wait for it, or choose another name.") from error
        try:
            for left in path.iterdir():
                left.unlink()
            yield path
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    finally:
        os.close(lock)


@contextmanager
def _in_words(to: Destination) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DarKnightError(
            f"cannot write {to.folder}: {error.strerror}. Make room there or choose another place; nothing was kept."
        ) from error
