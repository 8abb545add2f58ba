"""The enclave's half of shared memory: tensors for workers of this machine are written where the workers can see them.

A `Host` belongs to all links of a fleet to workers of this machine, a `Memory` to one of these links. Shares and
answers of a worker are in segments that only this worker gets. Weights are the same for all workers: they are written
once, into segments that all of them get and none of them can write.

Guarantees: a worker sees its own shares, its own answers and the weights; no other worker's. What it writes, and when,
    cannot crash the enclave, change another worker's tensors, or change a tensor that was taken: that is a copy. Only
    who asks for it (`Expected.lent`) sees an answer in place, and then nothing but its own worker writes there before
    it is released, also if the link ends meanwhile (contract tests: tests/wire/test_shared_memory.py,
    tests/wire/test_lending.py, tests/fleet/test_worker_memory.py).
Assumes: workers run as users that cannot read each other's or the enclave's memory by other means (ptrace).
Leaks: the number and sizes of segments, to the workers that get them; of weights, as much as the weights do anyway.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from darknight.types import Weights
from darknight.wire.arena import AT_ONCE, Arena, Block, Segment, write
from darknight.wire.bell import Bell
from darknight.wire.link import LinkClosed
from darknight.wire.segments import NOTE, Kind
from darknight.wire.switchboard import Switchboard

__all__ = ["Block", "Host", "Memory"]

_FRAME = bytes([Kind.FRAME])
STALL = 1.0  # seconds that a full door may stay full before its worker counts as gone


@dataclass(eq=False)
class _Written:
    """Weights in shared memory, and how many links have not forgotten them."""

    message: weakref.ref[Weights]
    segment: Segment
    block: Block
    links: int = 0


class Host:
    """What all links to workers of this machine share: the weights, the numbers of segments, and who listens."""

    def __init__(self) -> None:
        self.board = Switchboard()
        self._lock = threading.RLock()
        self._numbers = 0
        self._arena = Arena(Kind.WEIGHTS, self.next_number)
        self._written: weakref.WeakKeyDictionary[Weights, _Written] = weakref.WeakKeyDictionary()
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._closed = False

    def next_number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def join(self, memory: Memory) -> None:
        with self._lock:
            self._memories.add(memory)

    def hold(self, message: Weights) -> _Written:
        """The weights of `message` for one more link, written by the first that asks for this very message."""
        with self._lock:
            if self._closed:
                raise LinkClosed("the fleet's shared memory is closed")
            written = self._written.get(message)
            if written is None:
                segment, block = self._arena.take(message.tensor.nbytes)
                write(segment, block, message.tensor)
                written = self._written[message] = _Written(weakref.ref(message), segment, block)
            written.links += 1
            return written

    def release(self, written: _Written) -> None:
        """One link has forgotten these weights; with the last one the block is free."""
        with self._lock:
            written.links -= 1
            if written.links or self._closed:
                return
            message = written.message()
            if message is not None:
                del self._written[message]  # whoever posts it again writes it again
            for segment in self._arena.give(written.block):
                for memory in self._memories:
                    memory.say_farewell(segment.number)

    def close(self) -> None:
        """Gives all segments of weights back. A second time does nothing."""
        with self._lock:
            self._closed = True
            self._written.clear()
            self._arena.close()


class Memory:
    """One worker's part of the host's shared memory. Every method may be called from any thread.

    All of them raise LinkClosed when the worker is gone, has stopped taking descriptors, or the memory was closed.
    """

    def __init__(self, host: Host, door: socket.socket) -> None:
        self._host = host
        self._door = door
        self._door.setblocking(False)
        self._door_lock = threading.Lock()
        self._told: set[int] = set()  # segments that the worker knows
        self._farewells: deque[int] = deque()  # segments that are gone, and the worker may not know it yet
        self._lock = threading.Lock()
        self._arena = Arena(Kind.PRIVATE, host.next_number)
        self._weights: dict[tuple[str, int], _Written] = {}
        self._shown: dict[Block, weakref.ref[Tensor]] = {}  # that somebody reads in place
        self._closed = False
        self._bell: Bell | None = None
        host.join(self)

    def put(self, tensor: Tensor) -> Block:
        """Writes a tensor where the worker can read it. The block is the caller's to free."""
        segment, block = self._take(tensor.nbytes)
        write(segment, block, tensor)
        return block

    def reserve(self, nbytes: int) -> Block:
        """A place for the worker to write an answer of that many bytes to. The block is the caller's to free."""
        return self._take(nbytes)[1]

    def show(self, shape: tuple[int, ...], dtype: torch.dtype, *, keep: bool) -> tuple[Block, Tensor]:
        """`reserve`, `look` and, if it is to be kept, `keep` in one: a place, and what is in it."""
        segment, block = self._take(prod(shape) * dtype.itemsize)
        try:
            tensor = segment.view(block.offset, dtype, shape)
            if keep:
                self.keep(block, weakref.ref(tensor))
        except BaseException:
            self.free(block)
            raise
        return block, tensor

    def _take(self, nbytes: int) -> tuple[Segment, Block]:
        with self._lock:
            if self._closed:
                raise _closed()
            taken = self._arena.take(nbytes)
        if self._farewells or taken[0].number not in self._told:
            self._tell(taken[0])
        return taken

    def take(self, block: Block, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A copy, in the enclave's own memory, of what is in the block at this moment; it is read once.

        The worker can still write to the block; the copy does not change. Check the copy, never the block.
        """
        return self.look(block, shape, dtype).clone()

    def look(self, block: Block, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What is in the block, without a copy: the worker can still write to it. It may be read until it is freed."""
        with self._lock:
            self._check_open()
            segment = self._arena.find(block)
        if prod(shape) * dtype.itemsize > block.nbytes:
            raise ValueError(f"a tensor of shape {shape} and {dtype} is larger than its block of {block.nbytes} bytes.")
        return segment.view(block.offset, dtype, shape)

    def keep(self, block: Block, reader: weakref.ref[Tensor]) -> None:
        """Somebody reads the block in place, as this tensor. It stays until it is freed; if the memory is closed
        before, until the tensor is gone.
        """
        with self._lock:
            if self._closed:
                raise _closed()
            self._shown[block] = reader

    def let_go(self, block: Block) -> None:
        """Nobody here reads the block or writes to it any more; whose it is stays as it is."""
        with self._lock:
            self._shown.pop(block, None)

    def free(self, *blocks: Block) -> None:
        """Blocks may be used again. Call it when the worker has answered: until then it may still read or write."""
        with self._lock:
            for block in blocks:
                self._shown.pop(block, None)
                if not self._closed:
                    for segment in self._arena.give(block):
                        self.say_farewell(segment.number)

    def put_weights(self, message: Weights) -> Block:
        """Where all workers of this host find these weights; written by the first link that posts this message."""
        written = self._host.hold(message)
        superfluous: _Written | None = written
        with self._lock:
            if not self._closed:
                superfluous = self._weights.get((message.layer, message.version))
                self._weights[message.layer, message.version] = written
        if superfluous is not None:
            self._host.release(superfluous)
        self._check_open()
        self._tell(written.segment)
        return written.block

    def forget_weights(self, layer: str, version: int) -> None:
        """This worker needs these weights no more. Weights that it does not have are no error."""
        with self._lock:
            written = self._weights.pop((layer, version), None)
        if written is not None:
            self._host.release(written)

    def forget_all_weights(self) -> None:
        """This worker needs no weights that it has now."""
        with self._lock:
            forgotten, self._weights = list(self._weights.values()), {}
        for written in forgotten:
            self._host.release(written)

    def ring(self, frame: bytes) -> None:
        """Sends a frame of the protocol over the door: a tenth of what it costs through gRPC."""
        with self._door_lock:
            if self._closed:
                raise _closed()
            try:
                self._door.send(_FRAME + frame, AT_ONCE)
            except OSError:  # it is full, or gone
                if not self._send(partial(_send_frame, frame), patience=STALL):
                    raise LinkClosed("the worker reads nothing of what it is sent") from None

    @property
    def board(self) -> Switchboard:
        """Where `listen` is heard."""
        return self._host.board

    def listen(self) -> Bell:
        """What the worker says over the door."""
        with self._door_lock:
            self._check_open()
            self._bell = Bell(self._door.dup())
            return self._bell

    def say_farewell(self, number: int) -> None:
        """The segment is gone. The worker hears of it with the next new segment, or block of one."""
        self._farewells.append(number)  # not sent from here: this may be another link's thread

    def close(self) -> None:
        """Gives everything back, what is kept when nobody reads it any more, and closes the door. A second time does
        nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            shown = {block: reference() for block, reference in self._shown.items()}
            self._arena.close({block: tensor for block, tensor in shown.items() if tensor is not None})
        if self._bell is not None:
            self._bell.hang_up()
        self.forget_all_weights()
        with self._door_lock:
            self._door.close()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    def _tell(self, segment: Segment) -> None:
        """Makes sure that the worker has the segment, and tells it which are gone."""
        if segment.number in self._told and not self._farewells:
            return
        with self._door_lock:
            self._check_open()
            while self._farewells:
                gone = self._farewells[0]
                if gone in self._told and not self._send(partial(_say_gone, gone), patience=0.0):
                    break  # the door is full; there will be another time
                self._told.discard(gone)
                self._farewells.popleft()
            if segment.number in self._told:
                return
            if not self._send(segment.hand_over, patience=STALL):
                raise LinkClosed(f"the worker has taken nothing from its shared-memory socket for {STALL:g} s")
            self._told.add(segment.number)
            if segment.kind is Kind.PRIVATE:
                segment.drop_descriptor()  # nobody else gets it

    def _send(self, send: Callable[[socket.socket], None], patience: float) -> bool:
        """False if the door stayed full for `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            self._check_open()  # closing need not wait for a worker that takes nothing
            try:
                send(self._door)
                return True
            except OSError as error:
                # ETOOMANYREFS: this user has as many descriptors on the way as a process may hold
                if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):
                    raise LinkClosed(f"the worker closed its shared-memory socket ({error.strerror})") from None
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)


def _closed() -> LinkClosed:
    return LinkClosed("the link was closed")


def _send_frame(frame: bytes, door: socket.socket) -> None:
    door.send(_FRAME + frame, AT_ONCE)


def _say_gone(number: int, door: socket.socket) -> None:
    door.send(NOTE.pack(Kind.GONE, number, 0), AT_ONCE)
