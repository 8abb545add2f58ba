"""What a worker says over the door of its shared memory: the frames that would come through gRPC otherwise.

An answer whose tensors are in shared memory is a few hundred bytes. Through gRPC with TLS and its threads they cost the
enclave more than the copy of a small tensor does; over a Unix socket that both ends hold already, much less. Who is at
the other end is known: `wire.doors`. Who listens: `wire.switchboard`.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress

from darknight.wire.fields import HEADER_LIMIT, BadFrame
from darknight.wire.segments import Kind

OVER = b""  # no frame is empty


class Bell:
    """The enclave's ear at a door. One thread at a time listens; any may hang up."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._fetched: deque[bytes] = deque()  # packets that were fetched and not read yet

    def fileno(self) -> int:
        return self._door.fileno()

    def read(self) -> bytes | None:
        """The next frame; None if there is none at this moment, OVER when the worker has closed the door, or `hang_up`.

        Raises BadFrame for what is no frame.
        """
        packet = self._fetched.popleft() if self._fetched else self._receive()
        if not packet:
            return packet
        if packet[0] != Kind.FRAME or not 1 < len(packet) <= HEADER_LIMIT + 1:
            raise BadFrame("a packet of another form than the protocol's, on the shared-memory socket")
        return packet[1:]

    def fetch(self) -> bool:
        """Takes a packet from the door, for `read` to look at later. False if there is none, or will be no more."""
        packet = self._receive()
        if packet:
            self._fetched.append(packet)
        return bool(packet)

    def _receive(self) -> bytes | None:
        try:
            # One byte too many, so that a longer packet is noticed. Descriptors that come along are dropped by the
            # kernel.
            return self._door.recv(HEADER_LIMIT + 2, socket.MSG_DONTWAIT) or OVER
        except BlockingIOError:
            return None
        except OSError:
            return OVER

    def hang_up(self) -> None:
        """Nothing more is heard, and who listens is woken."""
        with suppress(OSError):  # nobody is there any more
            self._door.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._door.close()
