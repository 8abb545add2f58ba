"""Doors: Unix sockets over which the enclave hands descriptors of shared memory to a worker of its machine.

The two already talk over TLS. Inside TLS each one sends 16 random bytes to the other; at the door the enclave says the
one and the worker replies the other. The doorkeeper also lets in those who come for a pipe (`wire.pipe`), by TCP.

Guarantees: a process that is not one of the two gets no descriptor from the enclave and no hearing from the worker.
    Strangers at the worker's door can neither block nor break the others (contract tests: tests/wire/test_doors.py). By
    TCP a flood of strangers, more than PIPE_VISITORS in the time of a round trip, keeps enclaves from pipes, not from
    their links.
Assumes: whoever can take the worker's place at its socket (the path is the worker's own, mode 0600; an abstract name
    belongs to whoever binds it first) and pass the words on between the two is the worker's user, who could read the
    worker's memory anyway.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import selectors
import socket
import stat
import threading
import time

from darknight.errors import FleetError
from darknight.wire.link import LinkClosed, Misbehaved

TOKEN = 16  # bytes
_VISITORS = 64  # that have not said their word yet, at a time
PIPE_VISITORS = 512  # the same by TCP, where a word comes a round trip later
_PATIENCE = 2.0  # seconds for a visitor to say it
_LONGEST = 107  # bytes of a Unix socket's address
_BUFFER = 1 << 20  # bytes of packets under way: the worker may be busy for a while


def listen_at(name: str) -> socket.socket:
    """A listening socket at a path, or at "@name" in the abstract namespace. Raises FleetError in words.

    A path that a dead worker left behind is replaced; one where somebody listens, or that is no socket, is refused.
    """
    address = _address(name)
    try:
        listener = _socket()
    except OSError as error:
        raise FleetError(f"--shared-memory {name}: no socket can be made: {error.strerror}.") from None
    try:
        if isinstance(address, str):
            _remove_stale(address)
        _bind(listener, address)
        listener.listen(_VISITORS)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise FleetError(
                f"--shared-memory {name}: another worker listens there. Stop it, or choose another name."
            ) from None
        raise FleetError(f"--shared-memory {name}: cannot listen there: {error.strerror}.") from None
    except BaseException:
        listener.close()
        raise
    return listener


def keeper_at(name: str) -> Doorkeeper:
    """A doorkeeper for shared memory, at `name` as in `listen_at`."""
    return Doorkeeper(listen_at(name), None if name.startswith("@") else name)


def knock(name: str, mine: bytes, theirs: bytes, timeout: float) -> socket.socket:
    """The enclave's end of a door to the worker at `name`: says `mine` and insists on hearing `theirs`."""
    try:
        address = _address(name)
    except FleetError as error:
        raise LinkClosed(str(error)) from None
    deadline = time.monotonic() + timeout
    try:
        door = _socket()
    except OSError as error:  # no descriptors left
        raise LinkClosed(f"no socket can be made for the worker's shared memory ({error.strerror})") from None
    try:
        door.settimeout(timeout)
        while (code := door.connect_ex(address)) == errno.EAGAIN and time.monotonic() < deadline:
            time.sleep(0.01)  # others wait there to be let in; a socket with a timeout does not queue by itself
        if code:
            raise OSError(code, os.strerror(code))
        door.settimeout(max(0.001, deadline - time.monotonic()))
        door.send(mine)
        answer = door.recv(TOKEN + 1)
    except OSError as error:
        door.close()
        reason = error.strerror or "no answer in time"
        raise LinkClosed(f"nobody opens the shared-memory socket {name} ({reason})") from None
    if not hmac.compare_digest(answer, theirs):
        door.close()
        raise Misbehaved(f"another program than the worker answers at the shared-memory socket {name}")
    return door


class Visit:
    """An enclave that is expected at the door."""

    def __init__(self, keeper: Doorkeeper, hears: bytes, says: bytes) -> None:
        self._keeper = keeper
        self.hears = hears
        self.says = says
        self._arrived = threading.Event()
        self._door: socket.socket | None = None
        self._lock = threading.Lock()
        self._over = False

    def wait(self, timeout: float) -> socket.socket:
        """The door of this enclave, which is the caller's from now on. Raises TimeoutError if it does not come."""
        self._arrived.wait(timeout)
        with self._lock:
            door, self._door = self._door, None
        self.cancel()
        if door is None:
            raise TimeoutError("the enclave did not come to the shared-memory socket")
        return door

    def cancel(self) -> None:
        """The enclave is not expected any more; a door that nobody took is closed."""
        self._keeper.forget(self)
        with self._lock:
            self._over = True
            door, self._door = self._door, None
        if door is not None:
            door.close()
        self._arrived.set()

    def arrive(self, door: socket.socket) -> None:
        """Called by the doorkeeper; the door is closed if nobody waits any more."""
        with self._lock:
            if self._over:
                door.close()
            else:
                self._door = door
        self._arrived.set()


class Doorkeeper:
    """The worker's socket for all its enclaves: one thread lets in those who know their word.

    listener: where they come, which does not block. path: of that socket, to be removed at the end, or None. visitors:
    that may wait to say their word; one more, and the one who has been silent for longest has to go.
    """

    def __init__(self, listener: socket.socket, path: str | None = None, *, visitors: int = _VISITORS) -> None:
        self._path = path
        self._most = visitors
        self._listener = listener
        self._lock = threading.Lock()
        self._expected: dict[bytes, Visit] = {}
        self._visitors: dict[socket.socket, float] = {}  # who has not said it yet, and until when they may
        self._begun: dict[socket.socket, bytes] = {}  # what they have said of it, where words come in pieces
        self._bell, self._rope = socket.socketpair()  # to end the thread
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._keep, name="darknight-door", daemon=True)
        self._thread.start()

    def expect(self, hears: bytes, says: bytes) -> Visit:
        """Lets in, once, the one who says `hears`, and replies `says`."""
        if len(hears) != TOKEN or len(says) != TOKEN:
            raise ValueError(f"a word for the door has {TOKEN} bytes.")
        visit = Visit(self, hears, says)
        with self._lock:
            self._expected[hears] = visit
        return visit

    def forget(self, visit: Visit) -> None:
        with self._lock:
            if self._expected.get(visit.hears) is visit:
                del self._expected[visit.hears]

    def close(self) -> None:
        """Stops listening and removes the path. Doors that were opened stay open. A second time does nothing."""
        with self._lock:
            if self._listener.fileno() < 0:
                return
            expected = list(self._expected.values())
        self._rope.close()
        self._thread.join()
        for visit in expected:
            visit.cancel()
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _keep(self) -> None:
        while True:
            wait = min(self._visitors.values(), default=None)
            events = self._selector.select(None if wait is None else max(0.0, wait - time.monotonic()))
            ready = [key.fileobj for key, _ in events]
            if self._bell in ready:
                break
            for visitor in ready:
                assert isinstance(visitor, socket.socket)
                if visitor is self._listener:
                    self._accept()
                elif visitor in self._visitors:  # and was not shown out in this round
                    self._hear(visitor)
            now = time.monotonic()
            for visitor in [v for v, until in self._visitors.items() if until <= now]:
                self._dismiss(visitor).close()
        for left in [*self._visitors, self._listener, self._bell]:
            left.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            visitor, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the one who knocks stays in the queue: do not spin
                time.sleep(0.05)
            return
        visitor.setblocking(False)
        if len(self._visitors) >= self._most:
            self._dismiss(next(iter(self._visitors))).close()
        self._visitors[visitor] = time.monotonic() + _PATIENCE
        self._selector.register(visitor, selectors.EVENT_READ)

    def _dismiss(self, visitor: socket.socket) -> socket.socket:
        del self._visitors[visitor]
        self._begun.pop(visitor, None)
        self._selector.unregister(visitor)
        return visitor

    def _hear(self, visitor: socket.socket) -> None:
        try:
            # Without room for descriptors: those that come along are dropped by the kernel.
            said = visitor.recv(TOKEN + 1)
        except OSError:
            said = b""
        word = self._begun.get(visitor, b"") + said
        if said and len(word) < TOKEN and visitor.type == socket.SOCK_STREAM:
            self._begun[visitor] = word
            return
        door = self._dismiss(visitor)
        with self._lock:
            visit = self._expected.pop(word, None)
        if visit is None:
            door.close()
            return
        try:
            door.send(visit.says)
        except OSError:  # gone again
            door.close()
            visit.cancel()
        else:
            visit.arrive(door)


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return made


def _address(name: str) -> str | bytes:
    encoded = os.fsencode(name)
    if not 1 < len(encoded) <= _LONGEST or b"\0" in encoded:
        raise FleetError(
            f"--shared-memory: a name of {len(encoded)} bytes; needs a path or @name of 2 to {_LONGEST} bytes."
        )
    return b"\0" + encoded[1:] if encoded.startswith(b"@") else name


def _bind(listener: socket.socket, address: str | bytes) -> None:
    listener.bind(address)
    if isinstance(address, str):
        os.chmod(address, 0o600)


def _remove_stale(path: str) -> None:
    """Removes a socket at which nobody listens. Leaves what is alive to bind(), which refuses."""
    try:
        if not stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode):
            raise FleetError(f"--shared-memory {path}: there is a file that is no socket. Remove it or choose another.")
    except FileNotFoundError:
        return
    probe = _socket()
    try:
        probe.settimeout(1.0)
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except OSError:
        pass
    finally:
        probe.close()
