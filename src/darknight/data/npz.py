"""NumPy's npz archives: arrays x and y, or four of them for training and testing.

Arrays of images or of tables, bytes or numbers, with one label each. An array that is stored as it is (numpy.savez)
stays on disk until its examples are asked for, so a set may be larger than memory; a compressed one
(numpy.savez_compressed) is unpacked in memory, up to MEMORY_LIMIT. Either way the archive's checksum is verified first,
in one pass. Objects (allow_pickle) are never read.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from darknight.data.files import MEMORY_LIMIT, StillFile, check_unpacked, fill_from, refusing
from darknight.data.found import UNKNOWN, Found, Labelled, checked_labels
from darknight.data.npy import NpyHeader, read_npy_header
from darknight.data.source import Array, InMemory, Records, Source
from darknight.errors import DataError

_NEEDED = "an npz archive of NumPy"
# What zipfile raises on damaged archives, besides OSError.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    struct.error,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    UnicodeDecodeError,
    ValueError,
)
_ROLES = {
    "examples": ("x", "images", "data", "features"),
    "labels": ("y", "labels", "targets", "target"),
}
_CHANNELS = (1, 3, 4)
_CHUNK = 1 << 18
_LOCAL_HEADER = 30
_REMEDY = "Save it with numpy.savez, uncompressed and in C order: then it is read from disk."


def read_npz(path: Path, *, labelled: bool = True) -> Found:
    """The arrays in `path`. labelled=False: labels may be missing, and are UNKNOWN then."""
    file = StillFile(path)
    with file.opened(buffered=True) as raw, refusing(path, _NEEDED, *_DAMAGED), zipfile.ZipFile(raw) as archive:
        members = _members(archive, path, labelled)
        train = _read_part(archive, file, *members["train"])
        test = _read_part(archive, file, *members["test"]) if "test" in members else None
    known = [part.labels.max() for part in (train, test) if part is not None]
    return Found(name=path.name, train=train, test=test, classes=int(max(known)) + 1)


# --- which array is which ---------------------------------------------------------------------------------------------
_Pair = tuple[zipfile.ZipInfo, zipfile.ZipInfo | None]


def _members(archive: zipfile.ZipFile, path: Path, labelled: bool) -> dict[str, _Pair]:
    """Members for examples and labels of each part: "train" and "test", or "train" alone for an archive of one part."""
    found: dict[tuple[str, str], zipfile.ZipInfo] = {}
    for info in archive.infolist():
        role = _role(info.filename.removesuffix(".npy").lower())
        if role is None:
            continue
        if role in found:
            raise DataError(f"{path}: {found[role].filename!a} and {info.filename!a} mean the same. Leave one out.")
        found[role] = info
    parts = {part for part, _ in found}
    # Either one part or a pair, and nothing half said.
    for wanted in ({"train", "test"}, {""}, {"train"}):
        pairs = {part or "train": (found.get((part, "examples")), found.get((part, "labels"))) for part in wanted}
        complete = all(x is not None and (y is not None or not labelled) for x, y in pairs.values())
        if complete and parts == wanted:
            return cast("dict[str, _Pair]", pairs)
    names = ", ".join(ascii(info.filename) for info in archive.infolist()[:12])
    raise DataError(
        f"{path}: holds {names or 'nothing'}. Needs x.npy and y.npy, or train_x, train_y, test_x and test_y (x may be "
        f"called {', '.join(_ROLES['examples'][1:])}; y {', '.join(_ROLES['labels'][1:])}; x_train is train_x)."
    )


def _role(name: str) -> tuple[str, str] | None:
    """'train_x' -> ("train", "examples"); 'labels' -> ("", "labels"); a name that says nothing -> None."""
    match = re.fullmatch(r"(?:(train|test)_)?([a-z]+)(?:_(train|test))?", name)
    if match is None or (match[1] and match[3]):
        return None
    part = match[1] or match[3] or ""
    return next(((part, role) for role, words in _ROLES.items() if match[2] in words), None)


# --- one part ---------------------------------------------------------------------------------------------------------
def _read_part(
    archive: zipfile.ZipFile, file: StillFile, examples: zipfile.ZipInfo, labels: zipfile.ZipInfo | None
) -> Labelled:
    source = _examples(archive, file, examples)
    if labels is None:
        return Labelled(source, torch.tensor(UNKNOWN).expand(len(source)))  # one number, however many they are
    place = f"{file}, {labels.filename!a}"
    values = _labels(archive, file, labels)
    if values.shape not in ((len(source),), (len(source), 1)) or values.dtype.kind not in "iu":
        raise DataError(
            f"{place}: labels of shape {values.shape} and dtype {values.dtype} for {len(source)} examples. Needs one "
            "whole number for each."
        )
    return Labelled(source, checked_labels(values.reshape(-1), None, place))


def _examples(archive: zipfile.ZipFile, file: StillFile, info: zipfile.ZipInfo) -> Source:
    place = f"{file}, {info.filename!a}"
    with _opened(archive, file, info) as (stream, header):
        channels_last = _channels_last(header.shape, place)
        if info.compress_type == zipfile.ZIP_STORED and not header.fortran_order:
            while stream.read(_CHUNK):  # to its end, where zipfile compares the checksum
                pass
            return Records(
                file,
                header.shape[0],
                header.shape[1:],
                begin=_begin(file, info) + header.length,
                dtype=header.dtype,
                channels_last=channels_last,
            )
        return InMemory(place, _array(stream, header, info, place), channels_last)


def _labels(archive: zipfile.ZipFile, file: StillFile, info: zipfile.ZipInfo) -> Array:
    with _opened(archive, file, info) as (stream, header):
        return _array(stream, header, info, f"{file}, {info.filename!a}")


@contextmanager
def _opened(archive: zipfile.ZipFile, file: StillFile, info: zipfile.ZipInfo) -> Iterator[tuple[BinaryIO, NpyHeader]]:
    place = f"{file}, {info.filename!a}"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
        raise DataError(f"{place}: is encrypted, or compressed in an unusual way. {_REMEDY}")
    with refusing(place, _NEEDED, *_DAMAGED), archive.open(info) as member:
        stream = cast("BinaryIO", member)
        header = read_npy_header(stream, place)
        if header.length + header.nbytes != info.file_size or not header.nbytes:
            raise DataError(
                f"{place}: {info.file_size - header.length} bytes for an array of shape {header.shape} and dtype "
                f"{header.dtype}, which takes {header.nbytes}. It is empty or damaged."
            )
        yield stream, header


def _array(stream: BinaryIO, header: NpyHeader, info: zipfile.ZipInfo, place: str) -> Array:
    packed = max(info.compress_size, 0) if info.compress_type == zipfile.ZIP_DEFLATED else MEMORY_LIMIT
    check_unpacked(header.nbytes, packed, place, _REMEDY)
    buffer = np.empty(header.nbytes, dtype=np.uint8)
    fill_from(stream, buffer, place)
    array = buffer.view(header.dtype).reshape(header.shape, order="F" if header.fortran_order else "C")
    return np.ascontiguousarray(array)


def _begin(file: StillFile, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member are; zipfile has checked that its local header is there."""
    header = file.piece(info.header_offset, _LOCAL_HEADER).tobytes()
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    begin = info.header_offset + _LOCAL_HEADER + name + extra
    if begin + info.file_size > file.size:
        raise DataError(f"{file}, {info.filename!a}: ends after the end of the file. It was cut short.")
    return begin


def _channels_last(shape: tuple[int, ...], place: str) -> bool:
    """Images are (example, height, width), with channels in front or behind; a table is (example, column)."""
    if len(shape) in (2, 3):
        return False
    if len(shape) == 4:
        first, last = shape[1] in _CHANNELS, shape[3] in _CHANNELS
        if first != last:
            return last
        if first:
            raise DataError(
                f"{place}: shape {shape} could have its channels first or last. Move them, or crop the images."
            )
    raise DataError(
        f"{place}: shape {shape}. Needs (example, column), (example, height, width), or four axes with 1, 3 or 4 "
        "channels either second or last."
    )
