"""The transcript of a worker that is another process: its seat sends a copy of everything to the process that records.

For workers that the recording process has started itself: audits and tests. The copies travel over a Unix socket of
whole packets (SOCK_SEQPACKET, see `recording_pair`), so that a worker that is killed in the middle of a record, and the
one that is started in its place on the same socket, leave a record out and never garble one.

Packet: who (process and seat), what (a received message begins, a sent reply begins, more bytes of either), then for a
beginning the number of bytes of its tensors and its header, as on the wire, else the bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from darknight.types import Answer, Forget, Message, Record, Reply, Task, TooLarge, Weights
from darknight.wire import codec
from darknight.wire.link import Seat
from darknight.wire.seeds import share_of
from darknight.wire.transcript import Transcript

_log = logging.getLogger("darknight.wire")

_PACKET = struct.Struct("<IIB")  # process, seat, what
_LENGTH = struct.Struct("<Q")
_RECEIVED, _SENT, _MORE = 1, 2, 3
_PIECE = 1 << 17  # bytes of a tensor in one packet
_LONGEST = _PACKET.size + max(_PIECE, _LENGTH.size + codec.HEADER_LIMIT)
_UNFINISHED = 64  # records at a time: of workers that were killed in the middle of one
_seats = itertools.count()


def recording_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: one for `Recording`, the other, in the worker's process, for `RecordingSeat`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class RecordingSeat:
    """A seat that sends a copy of every message it reads and every reply it writes to a `Recording`.

    Guarantees: a reply, and the message it answers, are on their way to the recording before the enclave gets the
    reply. If the recording is closed, the seat works on without it (contract tests: tests/wire/test_recording.py).
    """

    def __init__(self, seat: Seat, sock: socket.socket) -> None:
        _check(sock)
        self._seat = seat
        self._sock: socket.socket | None = sock
        self._who = os.getpid() & 0xFFFFFFFF, next(_seats) & 0xFFFFFFFF
        self._lock = threading.Lock()

    def read(self) -> tuple[int, Message | TooLarge] | None:
        found = self._seat.read()
        if found is not None and not isinstance(found[1], TooLarge):  # of what was too large nothing was kept
            message = found[1]
            tensors = [] if isinstance(message, Forget) else [_tensor_of(message)]
            self._send(_RECEIVED, codec.header_of(message), tensors)
        return found

    def write(self, ticket: int, reply: Reply) -> None:
        tensors = list(reply.tensors.values()) if isinstance(reply, Answer) else []
        self._send(_SENT, codec.reply_header(reply), tensors)
        self._seat.write(ticket, reply)

    def close(self) -> None:
        self._seat.close()

    def _send(self, what: int, header: codec.Header, tensors: list[Tensor]) -> None:
        with self._lock:
            if self._sock is None:
                return
            length = sum(tensor.nbytes for tensor in tensors)
            try:
                self._sock.sendall(_PACKET.pack(*self._who, what) + _LENGTH.pack(length) + codec.pack(header))
                for piece in _pieces(tensors):
                    self._sock.sendmsg([_PACKET.pack(*self._who, _MORE), piece])
            except OSError as error:
                _log.warning("the recording has ended: %s", error.strerror)
                self._sock = None


@dataclass
class _Unfinished:
    """A record whose bytes have not all arrived. What is kept is what came, never what was announced."""

    what: int
    header: codec.Header
    length: int
    content: bytearray = field(default_factory=bytearray)


class Recording:
    """Reads what recording seats send, in a thread of its own, and keeps all of it: it grows with every message."""

    def __init__(self, sock: socket.socket) -> None:
        _check(sock)
        self._sock = sock
        self._transcript = Transcript()
        self._changed = threading.Condition()
        self._replies = 0
        self._end = ""  # why nothing more will come
        self._unfinished: dict[tuple[int, int], _Unfinished] = {}
        self._thread = threading.Thread(target=self._read, name="darknight-recording", daemon=True)
        self._thread.start()

    @property
    def records(self) -> list[Record]:
        with self._changed:
            return self._transcript.records

    def take(self) -> list[Record]:
        """The records so far, which are forgotten here."""
        with self._changed:
            return self._transcript.take()

    def wait_for(self, replies: int, timeout: float) -> None:
        """Returns when that many replies are recorded, with all that came before them. Raises TimeoutError."""
        with self._changed:
            self._changed.wait_for(lambda: self._replies >= replies or bool(self._end), timeout)
            if self._replies < replies:
                reason = self._end or f"no more came within {timeout:g} s"
                raise TimeoutError(f"{self._replies} replies of the worker are recorded, needs {replies}: {reason}.")

    def close(self) -> None:
        """Records nothing more; what is recorded stays. A second time does nothing."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._sock.close()

    def _read(self) -> None:
        end = "the worker closed its end"
        try:
            while packet := self._sock.recv(_LONGEST + 1):
                self._handle(packet)
        except OSError as error:
            end = f"the socket broke ({error.strerror})"
        except (codec.BadFrame, struct.error) as error:
            end = f"the worker sent a record that is none ({error})"
            _log.warning("a recording has ended: %s", end)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a worker must not wait for somebody to read
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _handle(self, packet: bytes) -> None:
        process, seat, what = _PACKET.unpack_from(packet)
        who, rest = (process, seat), memoryview(packet)[_PACKET.size :]
        if what == _MORE:
            record = self._unfinished.get(who)
            if record is None:
                raise codec.BadFrame("bytes that belong to no record")
            record.content += rest
        elif what in (_RECEIVED, _SENT):
            header = codec.unpack(bytes(rest[_LENGTH.size :]))
            record = self._unfinished[who] = _Unfinished(what, header, *_LENGTH.unpack_from(rest))
            if len(self._unfinished) > _UNFINISHED:
                del self._unfinished[next(iter(self._unfinished))]
        else:
            raise codec.BadFrame("a packet of no known kind")
        if len(record.content) >= record.length:
            del self._unfinished[who]
            self._finish(record)

    def _finish(self, record: _Unfinished) -> None:
        if record.what == _RECEIVED:
            form = codec.form_of(record.header)
            tensors = _tensors(record.content, [] if form is None else [form])
            message = codec.message_from(record.header, tensors[0] if tensors else None)
            with self._changed:
                self._transcript.received(message)
        else:
            forms = codec.reply_forms(record.header)
            tensors = _tensors(record.content, forms.values())
            reply = codec.reply_from(record.header, dict(zip(forms, tensors, strict=True)))
            with self._changed:
                self._transcript.sent(reply)
                self._replies += 1
                self._changed.notify_all()


def _check(sock: socket.socket) -> None:
    if sock.type != socket.SOCK_SEQPACKET:
        raise ValueError("a recording needs a socket of whole packets; make it with recording_pair().")


def _tensor_of(message: Weights | Task) -> Tensor:
    return message.tensor if isinstance(message, Weights) else share_of(message)


def _pieces(tensors: list[Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(content), _PIECE):
            yield content[begin : begin + _PIECE]


def _tensors(content: bytearray, forms: Iterable[codec.Form]) -> list[Tensor]:
    """The tensors that are in `content` one after another, each in memory of its own, with nothing left over."""
    found, begin = [], 0
    for dtype, shape in forms:
        end = begin + codec.nbytes_of((dtype, shape))
        part = content[begin:end]  # a copy: the next dtype might not be aligned here
        if len(part) != end - begin:
            raise codec.BadFrame("a record with fewer bytes than its header says")
        found.append(torch.frombuffer(part, dtype=dtype).reshape(shape) if part else torch.empty(shape, dtype=dtype))
        begin = end
    if begin != len(content):
        raise codec.BadFrame("a record with more bytes than its header says")
    return found
