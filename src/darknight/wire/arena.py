"""Where tensors for workers of this machine go: segments, and blocks in them that are taken, freed and taken again.

Memory that was written before is ten times faster to write than pages that are fresh from the kernel. So blocks go to
the first segment with room, and a segment that is free stays for a while; but not where memory is short.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from darknight.memory import is_short
from darknight.wire.link import LinkClosed
from darknight.wire.segments import NOTE, PAGE, SEGMENT, FreeList, Kind, Unmappable, create, empty_out

IDLE = 300.0  # seconds after which a segment that is wholly free is given back: the next step, if slow, needs it warm
_OFTEN = 1.0  # seconds between two looks for such segments
_LARGE = 64 << 20  # bytes of a block with which it is asked whether memory is short
AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Block(NamedTuple):
    """Bytes of one segment, for one tensor."""

    segment: int
    offset: int
    nbytes: int


class Segment:
    """One segment as the enclave has it: its bytes, which of them are in use, and its descriptor while it needs one."""

    def __init__(self, number: int, kind: Kind, size: int) -> None:
        self.number = number
        self.kind = kind
        self.free = FreeList(size)
        self.live: dict[int, int] = {}  # offset -> bytes
        self.used = 0.0  # when a block of it was last taken or freed
        # A descriptor that is closed while another thread sends it may be a number that the system has given to some
        # other file by then, and the worker would get that file.
        self._guard = threading.Lock()
        self._descriptor: int | None
        self._descriptor, self.content = create(size, kind)
        self._typed: dict[torch.dtype, Tensor] = {}  # all of it, by dtype

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """As `segments.view`, for a place that is aligned."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self.content.view(dtype)
        begin = offset // dtype.itemsize
        return typed[begin : begin + prod(shape)].view(shape)

    def hand_over(self, door: socket.socket) -> None:
        """Sends the segment to a worker, or raises OSError."""
        note = NOTE.pack(self.kind, self.number, self.free.size)
        with self._guard:
            if self._descriptor is None:
                raise LinkClosed("the link was closed")
            socket.send_fds(door, [note], [self._descriptor], AT_ONCE)

    def drop_descriptor(self) -> None:
        """It can be handed to nobody any more."""
        with self._guard:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def give_back(self, readers: Collection[Tensor] = ()) -> None:
        """It is not needed any more. A worker may keep its mapping, but no memory of the enclave with it.

        readers: views of it that somebody has still; it is emptied when the last of them is gone.
        """
        self.drop_descriptor()
        left = [None] * len(readers)
        for tensor in readers:
            weakref.finalize(tensor, _one_less, left, self.content).atexit = False
        if not readers:
            empty_out(self.content)


def _one_less(left: list[None], content: Tensor) -> None:
    """It takes no lock: the collector calls it in any thread and under any lock."""
    left.pop()
    if not left:
        empty_out(content)


class Arena:
    """Segments of one kind and the blocks in them: first fit, so that warm memory is used again. Not thread-safe."""

    def __init__(self, kind: Kind, number: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._kind = kind
        self._number = number
        self._clock = clock
        self._segments: dict[int, Segment] = {}
        self._looked = -math.inf  # for segments that nobody needs

    def take(self, nbytes: int) -> tuple[Segment, Block]:
        """A block; in a new segment only if no segment has room for it."""
        for segment in self._segments.values():
            offset = segment.free.take(nbytes)
            if offset is not None:
                break
        else:
            segment, offset = self._grown(nbytes)
        segment.live[offset] = nbytes
        segment.used = self._clock()
        return segment, Block(segment.number, offset, nbytes)

    def _grown(self, nbytes: int) -> tuple[Segment, int]:
        size = max(SEGMENT, -(-nbytes // PAGE) * PAGE)
        try:
            segment = Segment(self._number(), self._kind, size)
        except Unmappable as error:
            raise MemoryError(f"{error}. Free memory on this machine, or use smaller batches.") from None
        self._segments[segment.number] = segment
        offset = segment.free.take(nbytes)
        assert offset is not None  # it was made large enough
        return segment, offset

    def find(self, block: Block) -> Segment:
        """The segment of a block that is in use. Raises ValueError for one that was freed."""
        segment = self._segments.get(block.segment)
        if segment is None or segment.live.get(block.offset) != block.nbytes:
            raise ValueError("this block of shared memory is not in use: it was freed before, or is another link's.")
        return segment

    def give(self, block: Block) -> list[Segment]:
        """Frees a block. Returns the segments that went with it: those that were wholly free for `IDLE` seconds, or all
        that are if the block is large and the machine short of memory.
        """
        segment = self.find(block)
        del segment.live[block.offset]
        segment.free.give(block.offset, block.nbytes)
        segment.used = now = self._clock()
        short = block.nbytes >= _LARGE and is_short()
        if now - self._looked < _OFTEN and not short:
            return []
        self._looked = now
        stale = [s for s in self._segments.values() if (short or now - s.used >= IDLE) and s.free.whole]
        for gone in stale:
            del self._segments[gone.number]
            gone.give_back()
        return stale

    def close(self, read: Mapping[Block, Tensor] | None = None) -> None:
        """Gives all segments back: those of blocks that are still read when the tensors that show them are gone."""
        readers: dict[int, list[Tensor]] = defaultdict(list)
        for block, tensor in (read or {}).items():
            readers[block.segment].append(tensor)
        for segment in self._segments.values():
            segment.give_back(readers[segment.number])
        self._segments.clear()


def write(segment: Segment, block: Block, tensor: Tensor) -> None:
    """Copies a tensor into its block."""
    segment.view(block.offset, tensor.dtype, tensor.shape).copy_(tensor.detach())
