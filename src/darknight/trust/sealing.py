"""Sealed sets: records of one size that can be opened one by one, and a head that says what they are.

    DIR/manifest.json   public: format, a fresh id, how many records there are, how large they and the sealed head are
    DIR/head            a blob (trust/blob.py) whose label has the SHA-256 of the manifest
    DIR/records         record i at i * (record_bytes + 16): AES-256-GCM of it, nonce = i, under
                        key = HKDF-SHA256(data key, salt = SHA-256(manifest), info = "darknight records 1"),
                        AAD = SHA-256(manifest) || i || count, whole numbers big-endian in eight bytes

Guarantees: a record that `SealedRecords.read` gives for number i is the i-th that was written, of this set. A set that
was changed anywhere, cut short, extended, or put together from others is refused with a TrustError that says where,
and nothing of it is given away (contract tests: tests/trust/test_sealing.py, which also shows that a weaker format
lets each of them pass). Two sealings never share a (key, nonce): the manifest has a fresh id, and each record is
written once.
Assumes: the data key is known to the data holder and the enclave alone. That the set is the one that is meant is the
caller's to say, with `manifest`: without it, any set under the same data key will do.
Leaks: how many records there are, their size, the size of the head; and to whoever serves the files, which records are
read when.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from darknight.errors import DataError, TrustError, UsageError, other_format
from darknight.trust.blob import (
    TAG_BYTES,
    Bytes,
    cipher_for,
    nonce_of,
    open_bytes,
    sealed_pieces,
    sealed_size,
)
from darknight.trust.durable import sync_folder
from darknight.trust.fresh import fresh_nonce
from darknight.trust.key_file import DataKey
from darknight.types import Secret

MANIFEST, HEAD, RECORDS = "manifest.json", "head", "records"
LARGEST_RECORD, LARGEST_HEAD, MOST_RECORDS = 1 << 30, 1 << 32, 1 << 40
_NUMBER = 1
_KIND = "darknight sealed records "
_FORMAT = f"{_KIND}{_NUMBER}"
_INFO = b"darknight records 1"
_HEAD_LABEL = b"darknight head 1 "
_LARGEST_MANIFEST = 4096
_BUFFER = 1 << 19

Records = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What everybody may know of a sealed set. Its bytes are canonical: there is one way to write it."""

    format: str
    id: str
    count: int
    record_bytes: int
    head_bytes: int

    def to_bytes(self) -> bytes:
        return f"{json.dumps(asdict(self), indent=2)}\n".encode()

    @property
    def digest(self) -> bytes:
        """SHA-256: the name of the set."""
        return hashlib.sha256(self.to_bytes()).digest()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        try:
            words = json.loads(raw)
            _check_version(words)
            if not isinstance(words, dict) or words.keys() != {field.name for field in fields(cls)}:
                raise ValueError
            manifest = cls(**words)
            numbers = (manifest.count, manifest.record_bytes, manifest.head_bytes)
            if manifest.format != _FORMAT or not all(type(number) is int for number in numbers):
                raise ValueError
            if not re.fullmatch("[0-9a-f]{64}", manifest.id) or manifest.to_bytes() != raw:
                raise ValueError
            if not _possible(*numbers):
                raise ValueError
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, TrustError):
                raise
            raise TrustError(
                "the manifest is damaged. Take another copy of the sealed set.", check="manifest"
            ) from error
        return manifest


def write_sealed(
    folder: Path, key: DataKey, *, count: int, record_bytes: int, head: Bytes, records: Iterable[Records]
) -> Manifest:
    """Write a sealed set into `folder`, which must be there and empty, and wait until it is on the disk.

    records: (record, byte) arrays, which together hold exactly `count` records in their order. The manifest is written
    last: without it, a folder is no sealed set. OSError is for the caller.
    """
    if not _possible(count, record_bytes, sealed_size(len(head))):
        raise UsageError(
            f"{count} records of {record_bytes} bytes, with a head of {len(head)}; at most {MOST_RECORDS} of "
            f"{LARGEST_RECORD}, with one of {LARGEST_HEAD}, can be sealed. Split the set."
        )
    manifest = Manifest(
        format=_FORMAT,
        id=fresh_nonce().hex(),
        count=count,
        record_bytes=record_bytes,
        head_bytes=sealed_size(len(head)),
    )
    digest = manifest.digest
    with _new_file(folder / HEAD) as file:
        for piece in sealed_pieces(key, head, label=_HEAD_LABEL + digest):
            file.write(piece)
    del head  # of millions of records it is large
    with _new_file(folder / RECORDS) as file:
        _write_records(file, _Seal(key, manifest), records)
    with _new_file(folder / MANIFEST) as file:
        file.write(manifest.to_bytes())
    sync_folder(folder)
    return manifest


class SealedRecords(Secret):
    """A sealed set in `folder`, opened with its key. The files are read anew, and verified, each time.

    manifest: the SHA-256 that the manifest must have; None where any set under this key will do.
    """

    def __init__(self, folder: Path, key: DataKey, *, manifest: bytes | None) -> None:
        self._folder, self._path = folder, folder / RECORDS
        raw = _whole(folder / MANIFEST, most=_LARGEST_MANIFEST)
        self.manifest = _parsed(bytes(raw), folder / MANIFEST)
        if manifest is not None and manifest != self.manifest.digest:
            raise TrustError(
                f"{folder / MANIFEST}: is of another sealed set than the one that is meant. Take the folder that "
                "belongs to the key, or the key that belongs to the folder.",
                check="manifest",
            )
        self._seal = _Seal(key, self.manifest)
        with self._records():
            pass
        sealed = _whole(folder / HEAD, most=self.manifest.head_bytes)
        _check_size(folder / HEAD, len(sealed), needed=self.manifest.head_bytes)
        try:
            self.head = open_bytes(key, sealed, label=_HEAD_LABEL + self.manifest.digest)
        except TrustError as error:
            if error.check == "version":
                raise TrustError(f"{folder / HEAD}: {error}", check=error.check) from error
            raise TrustError(
                f"{folder}: does not open. The key is of another set, or the manifest or the head was changed. Take "
                "the right key, or another copy.",
                check="head",
            ) from error

    def __len__(self) -> int:
        return self.manifest.count

    def __str__(self) -> str:
        return str(self._folder)

    @property
    def record_bytes(self) -> int:
        return self.manifest.record_bytes

    def read(self, numbers: NDArray[np.int64]) -> Records:
        """(record, byte), in the order of `numbers`. Only these are read from the file."""
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self):
            raise IndexError(f"some numbers are outside 0 to {len(self) - 1}.")
        out = np.empty((len(numbers), self.record_bytes), dtype=np.uint8)
        stride = self.record_bytes + TAG_BYTES
        together = max(1, _BUFFER // stride)
        buffer = np.empty(min(together, len(numbers)) * stride, dtype=np.uint8).data
        indices = numbers.tolist()
        with self._records() as file:
            for first, last in _runs(numbers, together):
                sealed = buffer[: (last - first) * stride]
                _fill(file, sealed, indices[first] * stride, self._path)
                for at in range(first, last):
                    place = (at - first) * stride
                    self._open(indices[at], sealed[place : place + stride], out[at])
        return out

    def _open(self, index: int, sealed: memoryview, out: Records) -> None:
        try:
            self._seal.open(index, sealed, out)
        except InvalidTag as error:
            raise TrustError(
                f"{self._path}, record {index}: is not the one that was sealed there. It was changed, or "
                "comes from another place or another set. Take another copy.",
                check="record",
            ) from error

    @contextmanager
    def _records(self) -> Iterator[int]:
        with _opened(self._path) as file:
            _check_size(self._path, os.fstat(file).st_size, needed=len(self) * (self.record_bytes + TAG_BYTES))
            yield file


class _Seal:
    """One record to its sealed form and back."""

    def __init__(self, key: DataKey, manifest: Manifest) -> None:
        self._digest = manifest.digest
        self._count = manifest.count.to_bytes(8, "big")
        self._cipher: AESGCM = cipher_for(key, salt=self._digest, info=_INFO)
        self.count, self.record_bytes = manifest.count, manifest.record_bytes

    def close(self, index: int, record: Records, out: memoryview) -> None:
        self._cipher.encrypt_into(nonce_of(index), record.data, self._associated(index), out)

    def open(self, index: int, sealed: memoryview, out: Records) -> None:
        self._cipher.decrypt_into(nonce_of(index), sealed, self._associated(index), out.data)

    def _associated(self, index: int) -> bytes:
        return self._digest + index.to_bytes(8, "big") + self._count


def _write_records(file: BinaryIO, seal: _Seal, records: Iterable[Records]) -> None:
    """Each index is sealed once, because they are counted here and nowhere else."""
    index, stride = 0, seal.record_bytes + TAG_BYTES
    together = max(1, _BUFFER // stride)
    buffer = memoryview(bytearray(together * stride))
    for batch in records:
        if batch.ndim != 2 or batch.shape[1] != seal.record_bytes or index + len(batch) > seal.count:
            raise ValueError(
                f"records of shape {batch.shape} after {index} of {seal.count} of {seal.record_bytes} bytes"
            )
        for begin in range(0, len(batch), together):
            some = batch[begin : begin + together]
            for at, record in enumerate(some):
                seal.close(index, record, buffer[at * stride : (at + 1) * stride])
                index += 1
            file.write(buffer[: len(some) * stride])
    if index != seal.count:
        raise ValueError(f"{index} records of {seal.count}")


# --- files ------------------------------------------------------------------------------------------------------------
@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a regular file. A pipe in its place is refused, and holds up nobody."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DataError(f"{path}: is not a regular file. Needs a folder that `darknight seal` made.")
        yield descriptor
    finally:
        os.close(descriptor)


def _whole(path: Path, *, most: int) -> bytearray:
    """The whole file, or the first `most` + 1 bytes of a longer one."""
    with _opened(path) as file:
        content = bytearray(min(os.fstat(file).st_size, most + 1))
        _fill(file, memoryview(content), 0, path)
    return content


def _fill(file: int, buffer: memoryview, begin: int, path: Path) -> None:
    filled = 0
    while filled < len(buffer):
        try:
            count = os.preadv(file, [buffer[filled:]], begin + filled)
        except OSError as error:
            raise _unreadable(path, error) from error
        if not count:
            raise TrustError(f"{path}: was cut short while it was read. Take another copy.", check="size")
        filled += count


def _runs(numbers: NDArray[np.int64], together: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each stretch of consecutive numbers, of at most `together`."""
    if not len(numbers):
        return
    edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for first, last in pairwise(edges):
        for begin in range(first, last, together):
            yield begin, min(begin + together, last)


def _parsed(raw: bytes, path: Path) -> Manifest:
    try:
        return Manifest.from_bytes(raw)
    except TrustError as error:
        raise TrustError(f"{path}: {error}", check=error.check) from error


def _check_version(words: object) -> None:
    """Before anything else: in another format the rest may be different."""
    found = words.get("format") if isinstance(words, dict) else None
    if isinstance(found, str) and (match := re.fullmatch(rf"{_KIND}([0-9]{{1,9}})", found)):
        number = int(match[1])
        if number != _NUMBER:
            raise TrustError(f"the sealed set is of {other_format(number, reads=_NUMBER)}.", check="version")


def _possible(count: int, record_bytes: int, head_bytes: int) -> bool:
    limits = ((count, MOST_RECORDS), (record_bytes, LARGEST_RECORD), (head_bytes, LARGEST_HEAD))
    return all(1 <= number <= most for number, most in limits)


def _check_size(path: Path, found: int, *, needed: int) -> None:
    if found != needed:
        raise TrustError(
            f"{path}: {found} bytes; the manifest announces {needed}. It was cut short or extended. Take another copy.",
            check="size",
        )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}). Needs a folder that `darknight seal` made.")
