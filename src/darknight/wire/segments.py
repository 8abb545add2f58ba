"""Shared memory in pieces: a segment is a memfd that can never change its size, and a packet tells the worker of it.

A memfd has no name. When the last process that maps it or holds a descriptor ends, in whatever way, the kernel frees
it. Descriptors travel over a Unix socket, one in each packet, beside a fixed struct: what kind, which number, how many
bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import warnings
from enum import IntEnum
from math import prod

import torch
from torch import Tensor

from darknight.memory import ask_for_large_pages

ALIGNMENT = 64  # of every block, in bytes: a cache line, and a multiple of every dtype's size
SEGMENT = 32 << 20  # the least size of a segment
PAGE = mmap.PAGESIZE

SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE: no new writable mapping, no write(); mappings that exist go on
_NOEXEC_SEAL = 0x08  # MFD_NOEXEC_SEAL: Linux 6.3; hardened systems insist on it, older ones do not know it
_MADV_REMOVE = 9
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

NOTE = struct.Struct("<BIQ")  # kind, number, bytes


class Kind(IntEnum):
    """What a packet on the door is about."""

    PRIVATE = 1  # shares and answers of one worker: it may write
    WEIGHTS = 2  # the same for all workers of the host: nobody but the enclave writes
    GONE = 3  # given back; no descriptor comes with it
    FRAME = 4  # nothing: what follows in the packet is a frame of the protocol, as gRPC would carry it


class Unmappable(Exception):  # noqa: N818 - the reader of a packet says what it means for the link
    """A segment that cannot be made or mapped safely, and why."""


def create(size: int, kind: Kind) -> tuple[int, Tensor]:
    """A new sealed segment: its descriptor and all its bytes, writable by the caller.

    Guarantees: nobody can change its size, so no access by the enclave ends in SIGBUS because a worker cut it off.
    A segment of weights can be written through the returned tensor only, also by root. Contract test:
    tests/wire/test_shared_memory.py::test_a_worker_cannot_resize_a_segment_nor_write_weights_also_not_as_root.
    """
    try:
        descriptor = _memfd()
    except OSError as error:
        raise Unmappable(f"no shared memory: {error.strerror}") from None
    try:
        os.ftruncate(descriptor, size)
        content = _map_writable(descriptor, size)
        # Seals come last: the one against future writes would also stop this process from mapping it.
        seals = _SIZE_SEALS | (SEAL_FUTURE_WRITE if kind is Kind.WEIGHTS else 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except (OSError, Unmappable) as error:
        os.close(descriptor)
        raise Unmappable(f"no shared memory of {size} bytes: {error}") from None
    return descriptor, content


def open_segment(descriptor: int, size: int, kind: Kind) -> Tensor:
    """All bytes of a segment that somebody else made. The descriptor may be closed afterwards.

    Guarantees: it has as many bytes as it claims and keeps them, so that reading it cannot end in SIGBUS; if not,
    it is refused (contract test:
    tests/wire/test_shared_memory.py::test_a_packet_that_is_not_safe_is_refused_and_leaves_no_descriptor).
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        true_size = os.fstat(descriptor).st_size
        page = os.fstatvfs(descriptor).f_bsize
    except OSError as error:
        raise Unmappable(f"this is not a sealed segment: {error.strerror}") from None
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise Unmappable("its size is not sealed, so it could be cut off while it is being read")
    if page != PAGE:  # hugetlbfs: a page that the system has none left for is SIGBUS, whatever the size is
        raise Unmappable(f"it is made of pages of {page} bytes, and ordinary ones have {PAGE}")
    if kind is not Kind.WEIGHTS and seals & (fcntl.F_SEAL_WRITE | SEAL_FUTURE_WRITE):
        raise Unmappable("it is sealed against writing, and answers must be written")
    if true_size != size:
        raise Unmappable(f"it has {true_size} bytes and was announced with {size}")
    return _map_readable(descriptor, size) if kind is Kind.WEIGHTS else _map_writable(descriptor, size)


def empty_out(content: Tensor) -> None:
    """The pages of a segment go back to the system at once, also if somebody still maps it: whoever looks finds zeros.

    Does nothing to a segment of weights: the seal that keeps workers from writing forbids this too.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(content.data_ptr()), ctypes.c_size_t(content.nbytes), _MADV_REMOVE)


def view(content: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor at `offset`, without a copy. It keeps the mapping alive, whatever becomes of the segment."""
    return content[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("darknight", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("darknight", flags)


def _map_writable(descriptor: int, size: int) -> Tensor:
    # Through torch and not Python's mmap: that one keeps a descriptor for each mapping, and a process has 1024 of them.
    # torch leaves one open only if the mapping fails, so what can be known to fail is refused before.
    try:
        content = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise Unmappable(f"{error} (shared memory needs /proc)") from None
    ask_for_large_pages(content.data_ptr(), size)
    return content


def _map_readable(descriptor: int, size: int) -> Tensor:
    try:
        mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise Unmappable(str(error)) from None
    with warnings.catch_warnings():  # torch knows no tensors that cannot be written; nobody writes weights here
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        content = torch.frombuffer(mapping, dtype=torch.uint8)
    ask_for_large_pages(content.data_ptr(), size)
    return content


class FreeList:
    """Which bytes of one segment are free: first fit, aligned, neighbours merged.

    >>> ranges = FreeList(256)
    >>> ranges.take(100), ranges.take(64), ranges.take(128)
    (0, 128, None)
    >>> ranges.give(0, 100)
    >>> ranges.give(128, 64)
    >>> ranges.whole, ranges.take(256)
    (True, 0)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]  # (begin, end), sorted; no two touch
        self._most = size  # no range is larger

    def take(self, nbytes: int) -> int | None:
        """The offset of `nbytes` that are now taken; None if there is no such range."""
        need = aligned(nbytes)
        if need > self._most:
            return None
        for index, (begin, end) in enumerate(self._free):
            if end - begin > need:
                self._free[index] = (begin + need, end)
                return begin
            if end - begin == need:
                del self._free[index]
                return begin
        self._most = need - 1
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """The range that `take` gave out for `nbytes` is free again."""
        begin, end = offset, offset + aligned(nbytes)
        index = bisect.bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))
        if end - begin > self._most:
            self._most = end - begin

    @property
    def whole(self) -> bool:
        """Is nothing taken?"""
        return self._free == [(0, self.size)]


def aligned(nbytes: int) -> int:
    """What `nbytes` take up in a segment; nothing takes a place too, so that every block has its own."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
