"""Sealed pipes: the frames of a link between machines, over a TCP connection beside its gRPC stream.

gRPC cuts what it sends into TLS records of 16 KiB, copies it several times and wakes several threads for each frame,
which costs the enclave more than twice as much. So tensors, and the frames around them, go through a connection of
their own; the stream is for the greeting, in which the keys are agreed, and for the end.

    connecting  the enclave says its word, 16 bytes; the worker replies its own
    record      4 bytes: how many follow, big-endian; then a frame, sealed with AES-256-GCM: ciphertext and tag
    pulse       a record of nothing, after PULSE seconds in which an end had nothing to send

Each end gives the other 32 random bytes inside TLS; HKDF makes two words and two keys of them, one for each direction.
The nonce of a record is its number under its key. After RECORDS of them the next key is made of the last.

Guarantees: nobody but the two ends of the stream reads a frame. One that was changed, left out, repeated or moved, also
    to the other direction or another link, breaks the pipe, and nothing of it is used. So does silence: somebody on the
    way who takes what is sent and gives nothing on is noticed after SILENCE seconds (who gives on a byte now and then
    is not: deadlines of tasks are for that). A process that was forked from an end cannot send: it would use a nonce
    twice. Contract tests: tests/wire/test_pipe.py.
Assumes: the stream's TLS kept the 32 bytes of at least one end secret; AES-256-GCM and HKDF-SHA256 are sound.
Leaks: sizes and times of frames, and that an end is gone, to everybody on the way; as TLS does. A worker chooses the
    port at its own address to which the enclave says a word, 16 bytes, of which a worker that tries long can choose two
    or three.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from darknight.types import Secret
from darknight.wire.codec import CHUNK
from darknight.wire.doors import TOKEN
from darknight.wire.fields import HEADER_LIMIT

SECRET = 32  # bytes that each end gives
RECORDS = 1 << 20  # under one key: at most 2^36 blocks, of which the bound on what they show is 2^-57
_KEY = 32
_LENGTH = 4
_TAG = 16
_RECORD = _LENGTH + CHUNK + _TAG
_CUT_OFF = "it ended in the middle of a record"
PULSE = 15.0  # seconds after which an end that has nothing to say says so
SILENCE = 180.0  # seconds after which an end that has said nothing is gone; it may hold Python's lock for a while
_SPARE = 8  # pulses that may come at once, when somebody was held up
_AHEAD = 1 << 16  # bytes that may be read with the end of a record: the next one, if it is small

# A frame is not kept back for the next one. The kernel asks a silent peer for a sign of life too, so that one whose
# machine is gone is known to be after a minute, if nothing is on the way to it.
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)

Frame = bytes | memoryview


class PipeBroken(Exception):  # noqa: N818 - made into LinkClosed on one side and the end of a session on the other
    """The pipe ended in the middle, or what came was not sealed by the other end. The words are safe to show."""


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET)


@dataclass(frozen=True, eq=False, repr=False)
class Agreement(Secret):
    """What both ends make of their secrets: the words that they say, and the keys of what they send."""

    enclave_says: bytes
    worker_says: bytes
    enclave_key: bytes
    worker_key: bytes

    @classmethod
    def of(cls, enclave: bytes, worker: bytes) -> Agreement:
        if len(enclave) != SECRET or len(worker) != SECRET:
            raise ValueError(f"secrets of {len(enclave)} and {len(worker)} bytes; each has {SECRET}.")
        made = HKDF(SHA256(), 2 * TOKEN + 2 * _KEY, None, b"darknight/pipe/v1").derive(enclave + worker)
        keys = made[2 * TOKEN :]
        return cls(made[:TOKEN], made[TOKEN : 2 * TOKEN], keys[:_KEY], keys[_KEY:])


class Pipe:
    """One end. One thread at a time sends and one receives; any may hang up."""

    def __init__(self, connection: socket.socket, mine: bytes, theirs: bytes) -> None:
        """mine, theirs: the keys of what this end sends, and of what it receives."""
        self._connection = connection
        connection.settimeout(None)
        for level, option, value in _OPTIONS:
            connection.setsockopt(level, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *_seconds(SILENCE)))
        self._process = os.getpid()
        self._sends, self._receives = threading.Lock(), threading.Lock()  # while the connection is in use
        self._sealing, self._opening = _Direction(mine), _Direction(theirs)
        self._outgoing = _buffer(_RECORD + _LENGTH + HEADER_LIMIT + _TAG)  # a header, and a chunk
        self._ahead = _buffer(_AHEAD)
        self._begin = self._end = 0  # of what was read ahead
        self._sealed = _buffer(CHUNK + _TAG)
        self._frame = _buffer(CHUNK)
        self._begun = self._said = time.monotonic()  # said: when something was sent last
        self._pulses = 0  # that came
        _pulses.keep(self)

    # --- sending ----------------------------------------------------------------------------------------------------
    def send(self, frames: Iterable[Frame]) -> None:
        """Returns when all of them, each of 1 to CHUNK bytes, are on their way. Raises PipeBroken."""
        if os.getpid() != self._process:
            raise PipeBroken("this pipe belongs to the process that made it, of which this one is a copy")
        with self._sends:
            self._send(frames)

    def _send(self, frames: Iterable[Frame]) -> None:
        filled = 0
        for frame in frames:
            if not frame:
                raise ValueError("a frame without bytes; that is a pulse.")
            size = len(frame) + _TAG
            if filled + _LENGTH + size > len(self._outgoing):
                self._push(filled)
                filled = 0
            begin, end = filled + _LENGTH, filled + _LENGTH + size
            self._outgoing[filled:begin] = size.to_bytes(_LENGTH, "big")
            self._sealing.seal(frame, self._outgoing[begin:end])
            filled = end
        self._push(filled)

    def pulse(self) -> None:
        """Says that it is there, if nothing was said for a while and that can be done at once."""
        if os.getpid() != self._process or time.monotonic() - self._said < PULSE:
            return
        if not self._sends.acquire(blocking=False):
            return
        try:
            with suppress(OSError, ValueError, PipeBroken):  # it is gone: who receives hears why
                ready = select.poll()
                ready.register(self._connection, select.POLLOUT)
                if ready.poll(0):  # there is more room than this takes
                    self._outgoing[:_LENGTH] = _TAG.to_bytes(_LENGTH, "big")
                    self._sealing.seal(b"", self._outgoing[_LENGTH : _LENGTH + _TAG])
                    self._push(_LENGTH + _TAG)
        finally:
            self._sends.release()

    def _push(self, count: int) -> None:
        self._said = time.monotonic()
        try:
            self._connection.sendall(self._outgoing[:count])
        except OSError as error:
            raise PipeBroken(f"it broke: {error.strerror}") from None

    # --- receiving --------------------------------------------------------------------------------------------------
    def receive(self, place: memoryview | None = None) -> memoryview | None:
        """The next frame, until it is called again; None when there will be none. Raises PipeBroken.

        place: where it is opened, and given back, if it has just that size. It is written before the tag is looked at.
        """
        with self._receives:
            return self._receive(place)

    def _receive(self, place: memoryview | None) -> memoryview | None:
        while self._read_ahead(_LENGTH):
            size = int.from_bytes(self._ahead[self._begin : self._begin + _LENGTH], "big")
            self._begin += _LENGTH
            if not _TAG <= size <= len(self._sealed):
                raise PipeBroken("what came is no record; somebody changed it on the way, or it is not the other end")
            frame = self._frame[: size - _TAG] if place is None or len(place) != size - _TAG else place
            self._opening.open(self._record(size), frame)
            if size > _TAG:
                return frame
            self._count_pulse()
        return None

    def _count_pulse(self) -> None:
        """They cost time: an end that sends them all the time breaks the pipe."""
        self._pulses += 1
        if self._pulses > _SPARE + 2 * (time.monotonic() - self._begun) / PULSE:
            raise PipeBroken("the other end says that it is there, again and again")

    def _record(self, size: int) -> memoryview:
        """The next bytes, so many."""
        if size <= len(self._ahead):
            if not self._read_ahead(size):
                raise PipeBroken(_CUT_OFF)
            self._begin += size
            return self._ahead[self._begin - size : self._begin]
        there = self._end - self._begin
        self._sealed[:there] = self._ahead[self._begin : self._end]
        self._begin = self._end = 0
        while there < size:
            found = self._read(self._sealed[there:size], socket.MSG_WAITALL)
            if not found:
                raise PipeBroken(_CUT_OFF)
            there += found
        return self._sealed[:size]

    def _read_ahead(self, count: int) -> bool:
        """Until so many are there; False if there is nothing any more."""
        if self._begin + count > len(self._ahead):
            left = self._end - self._begin
            self._ahead[:left] = bytes(self._ahead[self._begin : self._end])
            self._begin, self._end = 0, left
        while self._end - self._begin < count:
            if self._begin == self._end:
                self._begin = self._end = 0
            found = self._read(self._ahead[self._end :], 0)
            if not found and self._begin < self._end:
                raise PipeBroken(_CUT_OFF)
            if not found:
                return False
            self._end += found
        return True

    def _read(self, place: memoryview, flags: int) -> int:
        try:
            return self._connection.recv_into(place, len(place), flags)
        except BlockingIOError:
            raise PipeBroken(f"nothing came for {SILENCE:g} s") from None
        except OSError as error:
            raise PipeBroken(f"it broke: {error.strerror}") from None

    # --- the end ----------------------------------------------------------------------------------------------------
    def finish(self, patience: float) -> None:
        """Nothing more is sent; returns when the other end has heard so, or after so many seconds."""
        deadline = time.monotonic() + patience
        with self._sends, suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self._connection.settimeout(left)
                if not self._connection.recv(_AHEAD):  # what is left unread would make the kernel drop what was sent
                    break

    def hang_up(self) -> None:
        """Whoever sends or receives is woken, at both ends."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Not before who sends or receives has noticed: its number would be another connection's."""
        self.hang_up()
        _pulses.drop(self)
        with self._sends, self._receives:
            self._connection.close()


def _buffer(size: int) -> memoryview:
    """Memory that goes back to the kernel with its pipe. Among Python's objects it would leave holes which these fill:
    each lost link would cost the process as much for good (tests/fleet/test_soak.py).
    """
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class _Direction(Secret):
    """A key, and the number of the next record under it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._number = 0

    def seal(self, frame: Frame, place: memoryview) -> None:
        nonce = self._next()
        self._cipher.encrypt_into(nonce, frame, None, place)

    def open(self, record: memoryview, place: memoryview) -> None:
        nonce = self._next()
        try:
            self._cipher.decrypt_into(nonce, record, None, place)
        except InvalidTag:
            raise PipeBroken("what came was not sealed by the other end; somebody changed it on the way") from None

    def _next(self) -> bytes:
        """A nonce that was never used with the key."""
        if self._number == RECORDS:
            self._key = HKDFExpand(SHA256(), _KEY, b"darknight/pipe/next").derive(self._key)
            self._cipher, self._number = AESGCM(self._key), 0
        number, self._number = self._number, self._number + 1
        return number.to_bytes(12, "big")


class _Pulses:
    """A thread that lets all pipes of this process say that they are there, as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipes: weakref.WeakSet[Pipe] = weakref.WeakSet()
        self._over = threading.Event()

    def keep(self, pipe: Pipe) -> None:
        with self._lock:
            if not self._pipes:
                self._over = threading.Event()
                name = "darknight-pipe-pulse"
                threading.Thread(target=self._run, args=(self._over,), name=name, daemon=True).start()
            self._pipes.add(pipe)

    def drop(self, pipe: Pipe) -> None:
        with self._lock:
            self._pipes.discard(pipe)
            if not self._pipes:
                self._over.set()

    def _run(self, over: threading.Event) -> None:
        while not over.wait(PULSE / 3):
            with self._lock:
                pipes = list(self._pipes) if over is self._over else []
            if not pipes:  # the last one was dropped, and perhaps there is another thread already
                return
            for pipe in pipes:
                with suppress(Exception):  # one that cannot be helped: the others have to go on
                    pipe.pulse()
            del pipe, pipes


_pulses = _Pulses()
os.register_at_fork(after_in_child=_pulses.__init__)  # type: ignore[misc]  # a copy has no thread, and no use for pipes


def _seconds(span: float) -> tuple[int, int]:
    """Seconds and microseconds."""
    return int(span), int(span % 1 * 1e6)


# --- connecting -----------------------------------------------------------------------------------------------------
def dial(host: str, port: int, agreement: Agreement, timeout: float) -> Pipe:
    """The enclave's end of a pipe to the worker that listens there. Raises PipeBroken in words.

    timeout: seconds for all of it, but that each address of a name may take as many.
    """
    connection, deadline = None, time.monotonic() + timeout
    try:
        connection = socket.create_connection((host, port), timeout)
        connection.sendall(agreement.enclave_says)
        reply = b""
        while len(reply) < TOKEN:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(TOKEN - len(reply))
            if not part:
                break
            reply += part
        if not hmac.compare_digest(reply, agreement.worker_says):
            raise PipeBroken(f"another program than the worker answers at {host} port {port}")
        return Pipe(connection, agreement.enclave_key, agreement.worker_key)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if not isinstance(error, OSError):
            raise
        raise PipeBroken(f"no pipe to {host} port {port} ({error.strerror or 'no answer in time'})") from None


def listen_for_pipes(host: str, port: int) -> socket.socket:
    """A listening socket for `wire.doors.Doorkeeper`; port 0: any free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server(
        (host, port), family=family, dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6()
    )
    listener.setblocking(False)
    return listener


def accepted(door: socket.socket, agreement: Agreement) -> Pipe:
    """The worker's end, over the door of an enclave that said its word."""
    return Pipe(door, agreement.worker_key, agreement.enclave_key)
