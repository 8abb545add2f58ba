"""What a worker says over the door of its shared memory: the frames that would come through gRPC otherwise.

An answer whose tensors are in shared memory is a few hundred bytes. Through gRPC with TLS and its threads they cost the
enclave more than the copy of a small tensor does; over a Unix socket that both ends hold already, much less. Who is at
the other end is known: `wire.doors`.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import suppress

from darknight.wire.fields import HEADER_LIMIT, BadFrame
from darknight.wire.segments import Kind


class Bell:
    """The enclave's ear at a door. One thread listens; any may hang up."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door

    def frames(self) -> Iterator[bytes]:
        """Until the worker closes the door, or `hang_up`. Raises BadFrame for what is no frame."""
        poll = select.poll()
        poll.register(self._door, select.POLLIN)
        with self._door:
            while True:
                poll.poll()
                try:
                    # One byte too many, so that a longer packet is noticed. Descriptors that come along are dropped by
                    # the kernel.
                    packet = self._door.recv(HEADER_LIMIT + 2)
                except BlockingIOError:
                    continue
                except OSError:
                    return
                if not packet:
                    return
                if packet[0] != Kind.FRAME or len(packet) > HEADER_LIMIT + 1:
                    raise BadFrame("a packet of another form than the protocol's, on the shared-memory socket")
                yield packet[1:]

    def hang_up(self) -> None:
        """Nothing more is heard, and who listens is woken."""
        with suppress(OSError):  # nobody is there any more
            self._door.shutdown(socket.SHUT_RDWR)
