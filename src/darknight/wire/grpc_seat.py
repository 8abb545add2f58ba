"""The worker's end: a gRPC server under mutual TLS, with one session for each enclave's stream.

Threads: gRPC's pool sends what a session answers; a session reads and computes in a thread of its own. It reads a
message when it is ready for it, so a busy worker holds up the enclave's sending and not its own memory.

Guarantees: only holders of the allowed certificates get a session. A stream that is malformed, or breaks, ends alone. A
    session holds at most one message that it is reading and one answer that is being sent, besides what it keeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Protocol

from darknight.errors import DarKnightError, UsageError
from darknight.wire import handshake
from darknight.wire.codec import BadFrame
from darknight.wire.doors import Doorkeeper, Visit
from darknight.wire.identity import Identity, fingerprint
from darknight.wire.link import Seat
from darknight.wire.mapped import Mapped
from darknight.wire.seat import GrpcSeat
from darknight.wire.tls import METHOD, SERVER_OPTIONS, SERVICE, TLS13_ONLY, grpc, server_credentials

_log = logging.getLogger("darknight.worker")

_HELLO = 10.0  # seconds for an enclave to say hello
_DOOR = 10.0  # seconds for it to come to the shared-memory socket
_SPARE_THREADS = 8  # for health checks, and for refusing streams in words


@dataclass(frozen=True)
class Peer:
    """Who opened a stream."""

    fingerprint: str
    address: str


class Session(Protocol):
    """What a worker does for one enclave."""

    def admit(self, nbytes: int) -> None:
        """Is there room for a tensor of that size? Raises OpError in words if not."""

    def serve(self, seat: Seat) -> None:
        """Reads and answers until the seat ends."""

    def close(self) -> None:
        """Gives everything back. Called once, after `serve`."""


class WorkerServer:
    """Serves enclaves at `listen` ("host:port"; port 0: any free one).

    allowed: the certificates (PEM) of the enclaves. about: operator, device and memory, for the welcome. open_session
    is called for each stream; a DarKnightError that it raises is passed on to the enclave, in its words.
    shared_memory: a Unix socket for enclaves of this machine: a path, or "@name".
    """

    def __init__(
        self,
        *,
        listen: str,
        identity: Identity,
        allowed: Sequence[bytes],
        about: Mapping[str, object],
        open_session: Callable[[Peer], Session],
        shared_memory: str | None = None,
        streams: int = 64,
    ) -> None:
        if not TLS13_ONLY:
            raise UsageError(
                "gRPC was imported before darknight.wire.tls, so TLS 1.2 cannot be ruled out. "
                "Import darknight.wire.tls first."
            )
        if not allowed:
            raise UsageError("no enclave is allowed; a worker needs at least one certificate (--allow-enclave).")
        handshake.welcome(about, None)  # whoever describes the worker wrongly hears of it now
        self._listen = listen
        self._identity = identity
        self._allowed = {fingerprint(certificate): certificate for certificate in allowed}
        self._about = dict(about)
        self._open_session = open_session
        self._shared_memory = shared_memory
        self._streams = streams
        self._lock = threading.Condition()
        self._seats: set[GrpcSeat] = set()
        self._stopping = False
        self._server: Any = None
        self._health: Any = None
        self._keeper: Doorkeeper | None = None

    def start(self) -> str:
        """Begins to serve; returns the address with the true port. Raises UsageError if it cannot."""
        most = self._streams + _SPARE_THREADS
        server = grpc.server(_Threads(), options=SERVER_OPTIONS, maximum_concurrent_rpcs=most)
        handler = grpc.stream_stream_rpc_method_handler(self._link)  # no serializers: bytes both ways
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self._health = _Health(server)
        credentials = server_credentials(self._identity, list(self._allowed.values()))
        try:
            port = server.add_secure_port(self._listen, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise UsageError(
                f"cannot listen at {self._listen}: the port is taken, or the address is not this machine's."
            )
        if self._shared_memory is not None:
            self._keeper = Doorkeeper(self._shared_memory)
        self._server = server
        server.start()
        self._health.say(serving=True)
        return f"{self._listen.rpartition(':')[0]}:{port}"

    def stop(self, grace: float) -> None:
        """No new sessions; tasks that run are answered within `grace` seconds, then every stream ends."""
        if self._server is None:
            return
        deadline = time.monotonic() + grace
        self._health.say(serving=False)
        with self._lock:
            self._stopping = True
            for seat in self._seats:
                seat.drain()
            self._lock.wait_for(lambda: not self._seats, max(0.0, grace))
        self._server.stop(max(0.2, deadline - time.monotonic()) if not self._seats else 0).wait()
        if self._keeper is not None:
            self._keeper.close()

    # --- one stream -------------------------------------------------------------------------------------------------
    def _link(self, requests: Any, context: Any) -> Iterator[bytes]:
        peer = self._peer(context)
        hello = self._hello(requests, context)
        if isinstance(hello, str):
            yield handshake.refusal(hello)
            return
        if self._stopping or len(self._seats) >= self._streams:
            why = "it is stopping" if self._stopping else f"it serves {self._streams} enclaves already"
            yield handshake.refusal(f"{why}. Try again later, or use another worker.")
            return
        try:
            session = self._open_session(peer)
        except DarKnightError as error:
            yield handshake.refusal(str(error))
            return
        token = handshake.new_token() if self._keeper is not None and hello.door is not None else None
        visit = None
        if self._keeper is not None and hello.door is not None and token is not None:
            visit = self._keeper.expect(hello.door, token)
        seat = GrpcSeat(requests, session.admit, None if visit is None else lambda: _mapped(visit, session))
        with self._lock:
            self._seats.add(seat)
        thread = threading.Thread(
            target=self._serve, args=(session, seat, visit), name="darknight-session", daemon=True
        )
        thread.start()
        if not context.add_callback(seat.end):
            seat.end()  # it was over before it began
        yield handshake.welcome(self._about, token)
        yield from seat.frames()
        if seat.complaint:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, seat.complaint)

    def _serve(self, session: Session, seat: GrpcSeat, visit: Visit | None) -> None:
        try:
            session.serve(seat)
        except Exception as error:  # one session's trouble is not the others'
            _log.error("a session ended with %s", type(error).__name__)
        finally:
            seat.close()
            if visit is not None:
                visit.cancel()
            session.close()
            with self._lock:
                self._seats.discard(seat)
                self._lock.notify_all()

    def _peer(self, context: Any) -> Peer:
        found = context.auth_context().get("x509_pem_cert", [])
        who = fingerprint(found[0]) if len(found) == 1 else ""
        if who not in self._allowed:  # TLS lets in what an allowed certificate has signed, too
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this certificate is not allowed (--allow-enclave)")
        return Peer(who, context.peer())

    def _hello(self, requests: Any, context: Any) -> handshake.Hello | str:
        """What the enclave says first, or why it is refused."""
        timer = threading.Timer(_HELLO, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            return handshake.read_hello(next(requests))
        except StopIteration:
            return "an enclave that says nothing"
        except handshake.Mismatch as error:
            return str(error)
        except BadFrame as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        finally:
            timer.cancel()


class _Threads(Executor):
    """A daemon thread for each job. The usual pool makes a program that ends without `stop` wait for its streams."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="darknight-stream", daemon=True).start()
        return future


def _mapped(visit: Visit, session: Session) -> Mapped:
    try:
        return Mapped(visit.wait(_DOOR), session.admit)
    except TimeoutError as error:
        raise BadFrame(str(error)) from None


class _Health:
    """gRPC's standard health service, for the server and for our own service."""

    def __init__(self, server: Any) -> None:
        # Here and not above: darknight.wire.tls must set gRPC's environment before anything imports gRPC.
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

        self._status = health_pb2.HealthCheckResponse
        self._servicer = health.HealthServicer()
        self.say(serving=False)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def say(self, *, serving: bool) -> None:
        for service in ("", SERVICE):
            self._servicer.set(service, self._status.SERVING if serving else self._status.NOT_SERVING)
