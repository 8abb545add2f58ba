"""The worker's half of shared memory: segments that the enclave hands over, and tensors in them, without a copy."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import prod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from darknight.errors import OpError
from darknight.wire.fields import HEADER_LIMIT, BadFrame
from darknight.wire.segments import ALIGNMENT, NOTE, Kind, Unmappable, open_segment, view

SEGMENTS = 4096  # that one enclave may have at a time
BYTES = 1 << 43  # of all of them together: mapping costs no memory, but addresses, and other enclaves need some too
_FRAME = bytes([Kind.FRAME])
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
PATIENCE = 5.0  # seconds that a descriptor may arrive after the message that speaks of its segment


class BadPlace(BadFrame):
    """A place that is none, or a segment that is not safe to map. The words are safe to show."""


class Mapped:
    """What one enclave has handed over. Every method may be called from any thread.

    `admit` is asked, with a number of bytes, before a tensor is given out for reading; it raises OpError if there is no
    room. The memory itself is the enclave's: what counts is how much of it the worker holds. But a page that the
    enclave never wrote is made when the worker reads it, and is the worker's then; so `most` bounds the sizes of all
    segments. One that does not fit is not mapped, and messages that need it are refused with OpError.

    Guarantees: a tensor lies inside a segment whose size is sealed, so that no access to it can end in SIGBUS; one for
    writing is never in a segment of weights. Tensors stay valid after `close`, until the last of them is dropped.
    Contract tests: tests/wire/test_shared_memory.py::test_a_place_that_is_not_inside_a_segment_is_refused,
    tests/wire/test_shared_memory.py::test_an_answer_cannot_be_placed_over_weights_and_a_segment_must_arrive.
    Assumes: nothing of the enclave but that it does not change a share before the answer; its own results depend on it.
    """

    def __init__(self, door: socket.socket, admit: Callable[[int], None], most: int = BYTES) -> None:
        self._door = door
        self._door.setblocking(False)
        self._admit = admit
        self._most = min(most, BYTES)
        self._lock = threading.Lock()
        self._segments: dict[int, tuple[Kind, Tensor | None]] = {}  # None: one that does not fit
        self._lingering: list[tuple[int, StorageWeakRef]] = []  # given back, while tensors in them are still kept
        self._gone: deque[int] = deque(maxlen=SEGMENTS)
        self._closed = False

    def tensor(self, place: tuple[int, int], dtype: torch.dtype, shape: tuple[int, ...], *, writable: bool) -> Tensor:
        """The tensor at (segment, offset). It waits a little for a segment that has not arrived yet.

        Raises BadPlace if there is no such place, and OpError if there is no room, or if the enclave has given the
        segment back since: then it does not want the answer either.
        """
        number, offset = place
        nbytes = prod(shape) * dtype.itemsize
        with self._lock:
            kind, content = self._segment(number)
        if content is None:
            if not writable:
                self._admit(nbytes)  # too large for any segment: then that is the reason to name
            raise OpError(
                f"no room: this worker maps {self._most >> 20} MiB of an enclave's shared memory at once, and the "
                "segment of this message does not fit. Use smaller batches, or ask the worker's operator for a larger "
                "--memory-limit or fewer --enclaves."
            )
        if offset % ALIGNMENT or not 0 <= offset <= len(content) - nbytes:
            raise BadPlace(f"{nbytes} bytes at a place that is not aligned or not inside its segment")
        if writable and kind is Kind.WEIGHTS:
            raise BadPlace("an answer that would have to be written over weights")
        if not writable:
            self._admit(nbytes)
        return view(content, offset, dtype, shape)

    # --- frames -----------------------------------------------------------------------------------------------------
    def next_frame(self) -> bytes | None:
        """The next frame of the protocol; None when there will be none. Segments that come before it are mapped."""
        poll = select.poll()
        with self._lock:
            if self._closed:
                return None
            poll.register(self._door, select.POLLIN)
        while True:
            with self._lock:
                kind = b"" if self._closed else self._peek()
                if kind == b"":
                    return None
                if kind == Kind.FRAME:
                    return self._read_frame()
                if kind is not None:
                    self._read_note()
                    continue
            poll.poll()

    def send(self, frame: bytes) -> None:
        """Returns when it is on its way, or the enclave is gone."""
        while True:
            with self._lock:
                if self._closed:
                    return
                try:
                    self._door.send(_FRAME + frame, _AT_ONCE)
                    return
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(self._door, select.POLLOUT)
                except OSError:
                    return
            poll.poll()

    def hang_up(self) -> None:
        """The enclave is gone: whoever waits for a frame, or for room to send one, is woken."""
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Drops all segments and the door. A second time does nothing. What was sent is still read by the enclave."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._segments.clear()
            with suppress(OSError):  # what is left unread here would make the kernel drop what the enclave has not read
                self._door.shutdown(socket.SHUT_RD)
                while self._door.recv(1, socket.MSG_DONTWAIT):
                    pass
            self._door.close()

    def _segment(self, number: int) -> tuple[Kind, Tensor | None]:
        deadline = time.monotonic() + PATIENCE
        while not self._closed:
            while self._read_note():
                pass
            found = self._segments.get(number)
            if found is not None:
                return found
            if number in self._gone:
                raise OpError("the enclave has given this part of the shared memory back before its message was read.")
            self._wait(deadline)
        raise BadPlace("the shared memory is closed")

    def _wait(self, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if self._peek() == Kind.FRAME:
            raise BadPlace("a message about a segment that comes after it, or never")
        poll = select.poll()
        poll.register(self._door, select.POLLIN)
        if remaining <= 0 or not poll.poll(1000 * remaining):
            raise BadPlace(f"a segment that was not handed over within {PATIENCE:g} s")

    def _peek(self) -> int | bytes | None:
        """What the next packet is about; nothing if the door is closed, None if there is no packet at this moment."""
        try:
            first = self._door.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        return first[0] if first else b""

    def _read_frame(self) -> bytes:
        packet = self._door.recv(HEADER_LIMIT + 2, socket.MSG_DONTWAIT)
        if len(packet) > HEADER_LIMIT + 1:
            raise BadPlace("a packet of another form than the protocol's")
        return packet[1:]

    def _read_note(self) -> bool:
        """Reads one packet about a segment from the door; False if there is none at this moment."""
        if self._peek() in (None, Kind.FRAME):  # a frame may come at any moment, and must not be read as a note
            return False
        descriptors: list[int] = []
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            # One byte too many for a note, so that a longer packet is noticed.
            packet, descriptors, state, _ = socket.recv_fds(self._door, NOTE.size + 1, 1, flags)
            self._handle(packet, descriptors, state)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise BadPlace(f"the shared-memory socket broke: {error.strerror}") from None
        finally:
            for descriptor in descriptors:  # a mapping needs none
                os.close(descriptor)

    def _handle(self, packet: bytes, descriptors: list[int], state: int) -> None:
        if not packet:
            raise BadPlace("the enclave closed the shared-memory socket")
        if state & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(packet) != NOTE.size:
            raise BadPlace("a packet of another form than the protocol's, or no descriptor is left for it (ulimit -n)")
        code, number, size = NOTE.unpack(packet)
        if code == Kind.GONE and not descriptors and number in self._segments:
            self._remove(number)
        elif code in (Kind.PRIVATE, Kind.WEIGHTS) and len(descriptors) == 1 and number not in self._segments:
            self._add(Kind(code), number, size, descriptors[0])
        else:
            raise BadPlace("a packet about a segment that is unknown, known already, or without its descriptor")

    def _add(self, kind: Kind, number: int, size: int, descriptor: int) -> None:
        self._lingering = [entry for entry in self._lingering if not entry[1].expired()]  # type: ignore[no-untyped-call]
        if len(self._segments) + len(self._lingering) >= SEGMENTS:
            raise BadPlace(f"more than {SEGMENTS} segments of shared memory at once")
        if not 0 < size <= BYTES:
            raise BadPlace(f"an empty segment, or one of more than {BYTES} bytes")
        taken = sum(len(content) for _, content in self._segments.values() if content is not None)
        if size > self._most - taken - sum(nbytes for nbytes, _ in self._lingering):
            self._segments[number] = kind, None
            return
        try:
            self._segments[number] = kind, open_segment(descriptor, size, kind)
        except Unmappable as error:
            raise BadPlace(f"a segment that cannot be mapped: {error}") from None

    def _remove(self, number: int) -> None:
        _, content = self._segments.pop(number)
        self._gone.append(number)
        if content is not None:
            memory = StorageWeakRef(content.untyped_storage())  # type: ignore[no-untyped-call]
            self._lingering.append((len(content), memory))
