"""What the enclave has for a worker and gRPC, or the pipe, has not taken yet. With shared memory nothing waits.

Guarantees: a worker that answers what it cannot have read is found out, so that it cannot make the enclave keep what it
    never fetches; nor can one that only ever gets messages without an answer, and reads none of them (contract test:
    tests/wire/test_rogue_worker.py).
Assumes: whoever sends tasks stops when their answers are late. So only messages are limited here, not their tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from torch import Tensor

from darknight.wire import codec
from darknight.wire.pipe import Frame
from darknight.wire.readers import raw

MOST_PARCELS = 1024  # that wait; a worker that reads has a few
MOST_BYTES = 16 << 20  # of their headers


@dataclass(eq=False, slots=True)
class Parcel:
    """A message that waits to be sent."""

    ticket: int
    header: bytes
    tensor: Tensor | None
    _claimed: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """Whether it is the caller's, to send it or to take it back: the first who asks gets it."""
        return self._claimed.acquire(blocking=False)


class Outbox:
    """What waits to be sent. `sent`: the latest ticket whose last frame was taken; tickets go in their order."""

    def __init__(self) -> None:
        self._stream: SimpleQueue[Parcel | None] = SimpleQueue()
        self._queue = self._stream  # or that of the pipe
        self._ring: Callable[[bytes], None] | None = None
        self.sent = 0
        self._bytes_put = self._bytes_taken = 0  # by two threads, so each has a number of its own

    @property
    def full(self) -> bool:
        """Nothing more may be put: the worker reads nothing."""
        return self._queue.qsize() >= MOST_PARCELS or self._bytes_put - self._bytes_taken >= MOST_BYTES

    def ring_with(self, ring: Callable[[bytes], None]) -> None:
        """From now on nothing waits: headers are handed to `ring` at once, and no tensor follows them."""
        self._ring = ring

    def put(self, parcel: Parcel) -> None:
        if self._ring is not None:
            if parcel.claim():
                self.sent = parcel.ticket  # before it is sent: the answer may come at any moment then
                self._ring(parcel.header)
            return
        self._bytes_put += len(parcel.header)
        self._queue.put(parcel)

    def end(self) -> None:
        """Nothing is sent any more. What waited is dropped: the link may be kept for its failure, its shares not."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        for queue in {self._queue, self._stream}:
            queue.put(None)

    def frames(self, hello: bytes) -> Iterator[bytes]:
        """What gRPC sends, made when it asks for it: at most one chunk is copied at a time."""
        yield hello
        for frames in self._messages(self._stream):
            yield from map(bytes, frames)
            del frames  # while it waits for the next it keeps nothing alive

    def detour(self) -> Iterator[Iterator[Frame]]:
        """From now on nothing goes through gRPC: the frames of each message are for who iterates this."""
        self._queue = SimpleQueue()
        return self._messages(self._queue)

    def _messages(self, queue: SimpleQueue[Parcel | None]) -> Iterator[Iterator[Frame]]:
        while (parcel := queue.get()) is not None:
            self._bytes_taken += len(parcel.header)
            if parcel.claim():
                yield self._frames_of(parcel)
            del parcel  # while it waits for the next it keeps nothing alive

    def _frames_of(self, parcel: Parcel) -> Iterator[Frame]:
        """It is noted as sent before its last frame goes out: an honest answer can only come after that one."""
        memory = memoryview(b"") if parcel.tensor is None else raw(parcel.tensor)
        if not memory:
            self.sent = parcel.ticket
        yield parcel.header
        for begin, end in codec.chunks_of(len(memory)):
            if end == len(memory):
                self.sent = parcel.ticket
            yield memory[begin:end]
