"""gRPC under TLS between a data holder and an enclave, at both ends.

The enclave's certificate is new at each start, and nobody vouches for it: a client takes whichever it is shown, and
learns from the evidence, which names it, whether it is the enclave's (darknight.trust.release).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from darknight.errors import DarKnightError, ServiceError, UsageError
from darknight.wire.codec import BadFrame
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.jobs import CHUNK, FETCH, LARGEST, SERVICE, UPLOAD, WATCH
from darknight.wire.tls import TLS13_ONLY, grpc

UNREACHABLE = "unreachable"
_SILENCE = 10_000  # milliseconds until a silent peer is asked for a sign of life, and how long it has to give one
_PATIENCE = 30.0  # seconds for an answer
_CONVERSATIONS = 64  # requests that are dealt with at once; watching is one
_OPTIONS = [
    ("grpc.max_receive_message_length", LARGEST),
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.per_message_decompression", 0),
    ("grpc.keepalive_time_ms", _SILENCE),
    ("grpc.keepalive_timeout_ms", _SILENCE),
    ("grpc.http2.max_pings_without_data", 0),
]
_CLIENT_OPTIONS = [
    *_OPTIONS,
    ("grpc.ssl_target_name_override", ENCLAVE),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", _SILENCE),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.http2.min_ping_interval_without_data_ms", _SILENCE // 2),
]


class Answering(Protocol):
    """What answers requests. A DarKnightError that it raises is told to the client, in its words."""

    def answer(self, method: str, message: bytes) -> bytes:
        """One answer to one request."""

    def stream(self, method: str, message: bytes, gone: Callable[[], bool]) -> Iterator[bytes]:
        """Answers for as long as there are any; `gone` says whether the client still listens."""

    def take(self, message: bytes, chunks: Iterator[bytes]) -> bytes:
        """One answer to a request and the file that follows it."""


class JobServer:
    """The enclave's end, at `listen` ("host:port"; port 0: any free one)."""

    def __init__(self, *, listen: str, identity: Identity, methods: tuple[str, ...], answering: Answering) -> None:
        if not TLS13_ONLY:
            raise UsageError("gRPC was imported before DarKnight, and speaks TLS 1.2. Import darknight first.")
        self._listen, self._answering = listen, answering
        self._pool = ThreadPoolExecutor(_CONVERSATIONS, thread_name_prefix="darknight-client")
        self._server = grpc.server(self._pool, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=_CONVERSATIONS)
        handlers = {method: self._handler(method) for method in methods}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        pair = [(identity.key, identity.certificate)]
        try:
            self._port = self._server.add_secure_port(listen, grpc.ssl_server_credentials(pair))
        except RuntimeError:
            self._port = 0
        if self._port == 0:
            raise UsageError(
                f"cannot listen at {listen}: the port is taken, or the address is not this machine's. "
                "Choose another --listen."
            )

    def start(self) -> str:
        """The address with the true port."""
        self._server.start()
        return f"{self._listen.rpartition(':')[0]}:{self._port}"

    def stop(self, grace: float) -> None:
        self._server.stop(grace).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _handler(self, method: str) -> Any:
        """No serializers: bytes both ways."""
        if method == UPLOAD:
            return grpc.stream_unary_rpc_method_handler(self._take)
        if method in (WATCH, FETCH):
            return grpc.unary_stream_rpc_method_handler(lambda message, call: self._stream(method, message, call))
        return grpc.unary_unary_rpc_method_handler(lambda message, call: self._answer(method, message, call))

    def _answer(self, method: str, message: bytes, call: Any) -> bytes:
        try:
            return self._answering.answer(method, message)
        except (DarKnightError, BadFrame) as error:
            return _refuse(call, error)

    def _stream(self, method: str, message: bytes, call: Any) -> Iterator[bytes]:
        try:
            yield from self._answering.stream(method, message, lambda: not call.is_active())
        except (DarKnightError, BadFrame) as error:
            _refuse(call, error)

    def _take(self, messages: Iterator[bytes], call: Any) -> bytes:
        try:
            first = next(messages, b"")
            return self._answering.take(first, messages)
        except (DarKnightError, BadFrame) as error:
            return _refuse(call, error)


def _refuse(call: Any, error: Exception) -> bytes:
    """Ends the call; the words travel as JSON-safe ASCII in the status."""
    check = getattr(error, "check", type(error).__name__)
    call.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{check}: {error}".encode("ascii", "replace").decode())
    raise AssertionError  # abort has raised


class JobChannel:
    """The client's end of one connection. certificate: the one that the enclave shows, DER, unverified."""

    def __init__(self, address: str, *, timeout: float = _PATIENCE) -> None:
        self.address = address
        self._timeout = timeout
        pem = shown_certificate(address, timeout)
        self.certificate = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
        credentials = grpc.ssl_channel_credentials(pem)
        self._channel: Any = grpc.secure_channel(f"dns:///{address}", credentials, _CLIENT_OPTIONS)

    def ask(self, method: str, message: bytes) -> bytes:
        with _in_words(self.address):
            answer: bytes = self._channel.unary_unary(f"/{SERVICE}/{method}")(message, timeout=self._timeout)
            return answer

    def listen(self, method: str, message: bytes) -> Iterator[bytes]:
        """Ends, or raises ServiceError, when the enclave does."""
        call = self._channel.unary_stream(f"/{SERVICE}/{method}")(message)
        try:
            with _in_words(self.address):
                yield from call
        finally:
            call.cancel()

    def send(self, message: bytes, chunks: Iterator[bytes]) -> bytes:
        def messages() -> Iterator[bytes]:
            yield message
            yield from chunks

        with _in_words(self.address):
            answer: bytes = self._channel.stream_unary(f"/{SERVICE}/{UPLOAD}")(messages())
            return answer

    def close(self) -> None:
        self._channel.close()


class _in_words:  # noqa: N801 - a context, read as a word
    """gRPC's errors as ours."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, grpc.RpcError):
            return
        code, details = error.code(), str(error.details() or "")
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            check, _, text = details.partition(": ")
            raise ServiceError(text, check=check) from None
        raise ServiceError(
            f"{self._address}: the enclave does not answer ({code.name.lower()}).", check=UNREACHABLE
        ) from None


def shown_certificate(address: str, timeout: float) -> bytes:
    """The certificate (PEM) of whoever answers at `address`. It proves nothing yet."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=timeout) as plain,
            context.wrap_socket(plain) as encrypted,
        ):
            der = encrypted.getpeercert(binary_form=True)
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"{address}: nobody answers ({error}). Is it the address of an enclave?", check=UNREACHABLE
        ) from None
    if der is None:
        raise ServiceError(f"{address}: whoever answers shows no certificate.", check=UNREACHABLE)
    return ssl.DER_cert_to_PEM_cert(der).encode()


def pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """A file in chunks."""
    while chunk := read(CHUNK):
        yield chunk
