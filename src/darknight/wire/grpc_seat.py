"""The worker's end: a gRPC server under mutual TLS, with one session for each enclave's stream.

Threads: gRPC's pool sends what a session answers; a session reads and computes in a thread of its own. It reads a
message when it is ready for it, so a busy worker holds up the enclave's sending and not its own memory.

Guarantees: only holders of the allowed certificates get a session. A stream that is malformed, or breaks, ends alone. A
    session holds at most one message that it is reading and one answer that is being sent, besides what it keeps.
    Streams that are no session, however many one certificate opens, keep no other certificate out. Contract tests:
    tests/wire/test_grpc.py, tests/wire/test_fuzz.py::test_a_worker_survives_every_stream.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]  # imports no gRPC: that is for wire.tls to do

from darknight.errors import DarKnightError, UsageError
from darknight.wire import handshake
from darknight.wire.codec import BadFrame
from darknight.wire.doors import PIPE_VISITORS, Doorkeeper, Visit, keeper_at
from darknight.wire.identity import Identity, fingerprint
from darknight.wire.link import Seat
from darknight.wire.mapped import BYTES, Mapped
from darknight.wire.pipe import Agreement, Pipe, accepted, listen_for_pipes, new_secret
from darknight.wire.seat import GrpcSeat
from darknight.wire.tls import METHOD, SERVER_OPTIONS, SERVICE, TLS13_ONLY, grpc, server_credentials

_log = logging.getLogger("darknight.worker")

_HELLO = 5.0  # seconds for an enclave to say hello
_NEWCOMERS = 4  # streams of one certificate that are not sessions yet, or never will be
_FAREWELL = 30.0  # seconds for an enclave to take what its session wrote last
_DOOR = 10.0  # seconds for it to come to the shared-memory socket, or for its pipe
_SPARE_STREAMS = 8  # that end while others begin
_HEALTH = "grpc.health.v1.Health"
_LONGEST_CHECK = 256  # bytes of a question about health


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
    shared_memory: a Unix socket for enclaves of this machine: a path, or "@name". shared_bytes: how much of it one
    session may have mapped. pipe_port: where enclaves of other machines are waited for with a pipe, on the same host;
    0: any free port; None: nowhere, and all their frames come through gRPC.
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
        shared_bytes: int = BYTES,
        pipe_port: int | None = 0,
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
        self._shared_bytes = shared_bytes
        self._pipe_port = pipe_port
        self._streams = streams
        self._lock = threading.Condition()
        self._seats: set[GrpcSeat] = set()
        self._newcomers: Counter[str] = Counter()  # by certificate
        self._stopping = False
        self._server: Any = None
        self._keeper: Doorkeeper | None = None
        self._porter: Doorkeeper | None = None  # of pipes

    @property
    def pipe_port(self) -> int | None:
        """Where enclaves are waited for with a pipe; the true port, when it has started."""
        return self._pipe_port

    def start(self) -> str:
        """Begins to serve; returns the address with the true port. Raises UsageError if it cannot."""
        most = self._streams + _NEWCOMERS * len(self._allowed) + _SPARE_STREAMS
        server = grpc.server(_Threads(), options=SERVER_OPTIONS, maximum_concurrent_rpcs=most)
        handler = grpc.stream_stream_rpc_method_handler(self._link)  # no serializers: bytes both ways
        # Health is our own. The stock service has Watch, which can be made to hang the whole server; gRPC now answers
        # UNIMPLEMENTED for it. Check is a stream here, as a single message would be waited for without a limit.
        check = grpc.stream_unary_rpc_method_handler(self._check)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),
                grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
            )
        )
        credentials = server_credentials(self._identity, list(self._allowed.values()))
        try:
            port = server.add_secure_port(self._listen, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise UsageError(
                f"cannot listen at {self._listen}: the port is taken, or the address is not this machine's. "
                "Choose another --listen."
            )
        host = self._listen.rpartition(":")[0]
        if self._shared_memory is not None:
            self._keeper = keeper_at(self._shared_memory)
        if self._pipe_port is not None:
            self._listen_for_pipes(host.removeprefix("[").removesuffix("]"), self._pipe_port)
        self._server = server
        server.start()
        return f"{host}:{port}"

    def _listen_for_pipes(self, host: str, port: int) -> None:
        try:
            listener = listen_for_pipes(host, port)
        except OSError as error:
            if self._keeper is not None:
                self._keeper.close()
            why = os.strerror(error.errno) if error.errno else "no such address"
            raise UsageError(
                f"cannot listen at {host} port {port} for pipes: {why}. Choose another --pipe-port."
            ) from None
        self._pipe_port = listener.getsockname()[1]
        self._porter = Doorkeeper(listener, visitors=PIPE_VISITORS)

    def stop(self, grace: float) -> None:
        """No new sessions; tasks that run are answered within `grace` seconds, then every stream ends."""
        if self._server is None:
            return
        deadline = time.monotonic() + grace
        with self._lock:
            self._stopping = True
            for seat in self._seats:
                seat.drain()
            self._lock.wait_for(lambda: not self._seats, max(0.0, grace))
        self._server.stop(max(0.2, deadline - time.monotonic()) if not self._seats else 0).wait()
        for keeper in (self._keeper, self._porter):
            if keeper is not None:
                keeper.close()

    # --- one stream -------------------------------------------------------------------------------------------------
    def _link(self, requests: Any, context: Any) -> Iterator[bytes]:
        peer = self._peer(context)
        with self._newcomer(peer, context):
            found = self._received(peer, requests, context)
            if isinstance(found, bytes):
                yield found
                return
        hello, session = found
        seat, visit, welcome = self._begun(hello, session, requests, context)
        for over in (seat.end, *([] if visit is None else [visit.cancel])):
            if not context.add_callback(over):
                over()  # it was over before it began
        yield welcome
        yield from seat.frames()
        if seat.complaint:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, seat.complaint)

    def _begun(
        self, hello: handshake.Hello, session: Session, requests: Any, context: Any
    ) -> tuple[GrpcSeat, Visit | None, bytes]:
        """A thread serves the session, and closes it. Returns its seat, who is expected at a door, and the welcome."""
        seat = visit = token = mapped = pipe = place = None
        try:
            if self._keeper is not None and hello.door is not None:
                token = handshake.new_token()
                visit = self._keeper.expect(hello.door, token)
                mapped = partial(self._mapped, visit, session)
            elif self._porter is not None and self._pipe_port is not None and hello.pipe is not None:
                place = handshake.Waiting(self._pipe_port, new_secret())
                agreement = Agreement.of(hello.pipe, place.secret)
                visit = self._porter.expect(agreement.enclave_says, agreement.worker_says)
                pipe = partial(_piped, visit, agreement)
            seat = GrpcSeat(requests, session.admit, mapped, pipe)
            with self._lock:
                self._seats.add(seat)
            arguments = session, seat, visit, context
            threading.Thread(target=self._serve, args=arguments, name="darknight-session", daemon=True).start()
        except BaseException:  # no thread to be had, say
            self._leave(session, seat, visit)
            raise
        return seat, visit, handshake.welcome(self._about, token, hello.protocol, place)

    def _serve(self, session: Session, seat: GrpcSeat, visit: Visit | None, context: Any) -> None:
        try:
            session.serve(seat)
        except Exception as error:  # one session's trouble is not the others'
            _log.error("a session ended with %s", type(error).__name__)
        finally:
            self._leave(session, seat, visit)
            if not self._stopping:  # else `stop` ends it
                _cancel_after(_FAREWELL, context)  # an enclave that does not read would keep the stream for ever

    def _leave(self, session: Session, seat: GrpcSeat | None, visit: Visit | None) -> None:
        if seat is not None:
            seat.close()
        if visit is not None:
            visit.cancel()
        session.close()
        with self._lock:
            if seat is not None:
                self._seats.discard(seat)
            self._lock.notify_all()

    def _peer(self, context: Any) -> Peer:
        found = context.auth_context().get("x509_pem_cert", [])
        who = fingerprint(found[0]) if len(found) == 1 else ""
        if who not in self._allowed:  # TLS lets in what an allowed certificate has signed, too
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this certificate is not allowed (--allow-enclave)")
        return Peer(who, context.peer())

    @contextmanager
    def _newcomer(self, peer: Peer, context: Any) -> Iterator[None]:
        """While a stream is no session. One too many of a certificate ends at once, before anything of it is read."""
        with self._lock:
            crowded = self._newcomers[peer.fingerprint] >= _NEWCOMERS
            self._newcomers[peer.fingerprint] += not crowded
        if crowded:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_NEWCOMERS} streams of this enclave are waiting to be heard already. Try again in {_HELLO:g} s.",
            )
        try:
            yield
        finally:
            with self._lock:
                self._newcomers[peer.fingerprint] -= 1

    def _received(self, peer: Peer, requests: Any, context: Any) -> tuple[handshake.Hello, Session] | bytes:
        """What the enclave says first, and its session; or the frame that says why it is refused."""
        first = _first(requests, context)
        if first is None:
            return handshake.refusal("an enclave that says nothing")
        try:
            hello = handshake.read_hello(first)
        except handshake.Mismatch as error:
            return handshake.refusal(str(error))
        except BadFrame as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        if self._stopping or len(self._seats) >= self._streams:
            why = "it is stopping" if self._stopping else f"it serves {self._streams} enclaves already"
            return handshake.refusal(f"{why}. Try again later, or use another worker.", hello.protocol)
        try:
            return hello, self._open_session(peer)
        except DarKnightError as error:
            return handshake.refusal(str(error), hello.protocol)

    def _mapped(self, visit: Visit, session: Session) -> Mapped:
        try:
            return Mapped(visit.wait(_DOOR), session.admit, self._shared_bytes)
        except TimeoutError as error:
            raise BadFrame(str(error)) from None

    # --- health -----------------------------------------------------------------------------------------------------
    def _check(self, requests: Any, context: Any) -> bytes:
        """gRPC's standard question, for the whole server ("") and for our own service."""
        with self._newcomer(self._peer(context), context):
            question = _first(requests, context)
        try:
            if question is None or len(question) > _LONGEST_CHECK:
                raise DecodeError
            service = health_pb2.HealthCheckRequest.FromString(question).service
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no question about a service's health")
            raise
        if service not in ("", SERVICE):
            context.abort(grpc.StatusCode.NOT_FOUND, f'services here: "" and "{SERVICE}"')
        kind = health_pb2.HealthCheckResponse
        answer: bytes = kind(status=kind.NOT_SERVING if self._stopping else kind.SERVING).SerializeToString()
        return answer


def _piped(visit: Visit, agreement: Agreement) -> Pipe:
    try:
        return accepted(visit.wait(_DOOR), agreement)
    except TimeoutError:
        raise BadFrame("the enclave did not come for its pipe") from None


def _first(requests: Any, context: Any) -> bytes | None:
    """The first frame of a stream; None if it ends without one. Who is silent for too long is cut off."""
    timer = _cancel_after(_HELLO, context)
    try:
        return next(requests, None)
    finally:
        timer.cancel()


def _cancel_after(seconds: float, context: Any) -> threading.Timer:
    timer = threading.Timer(seconds, context.cancel)
    timer.daemon = True
    timer.start()
    if not context.add_callback(timer.cancel):
        timer.cancel()  # it is over already
    return timer


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
