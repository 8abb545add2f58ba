"""Ends of a link that do not keep to the protocol."""

import socket
import ssl
import threading
from contextlib import contextmanager, suppress

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from darknight.wire import handshake
from darknight.wire.grpc_seat import _Threads
from darknight.wire.identity import WORKER, Identity
from darknight.wire.tls import (
    CLIENT_OPTIONS,
    METHOD,
    SERVER_OPTIONS,
    SERVICE,
    client_credentials,
    grpc,
    server_credentials,
)
from wire.peers import ABOUT


@contextmanager
def rogue_worker(enclave: Identity, talk, *, welcome=None, compression=None):
    """A server that says `welcome` and then what talk(requests) yields: (address, certificate)."""
    worker = Identity.create(WORKER)

    def handle(requests, context):
        if compression is not None:
            context.set_compression(compression)
        next(requests)
        if callable(welcome):
            yield from welcome()
        else:
            yield handshake.welcome(ABOUT, None) if welcome is None else welcome
        yield from talk(requests)

    options = [(name, value) for name, value in SERVER_OPTIONS if "message_length" not in name]
    server = grpc.server(_Threads(), options=options)
    handler = grpc.stream_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(worker, [enclave.certificate]))
    server.start()
    try:
        yield f"127.0.0.1:{port}", worker.certificate
    finally:
        server.stop(0).wait()


@contextmanager
def raw_stream(address: str, certificate: bytes, enclave: Identity, frames, compression=None):
    """A stream that sends what it likes: the call, whose responses can be iterated."""
    options = [(name, value) for name, value in CLIENT_OPTIONS if "message_length" not in name]
    with grpc.secure_channel(address, client_credentials(enclave, certificate), options) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(frames), compression=compression)
        try:
            yield call
        finally:
            call.cancel()


@contextmanager
def tap(address: str):
    """A proxy that keeps what passes: (its address, {"up": bytearray, "down": bytearray})."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    seen = {"up": bytearray(), "down": bytearray()}
    sockets, threads = [listener], []

    def pump(source, target, kept):
        try:
            while data := source.recv(1 << 16):
                kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept():
        try:
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                sockets.extend((near, far))
                for arguments in ((near, far, seen["up"]), (far, near, seen["down"])):
                    threads.append(threading.Thread(target=pump, args=arguments, daemon=True))
                    threads[-1].start()
        except OSError:
            pass

    threads.append(threading.Thread(target=accept, daemon=True))
    threads[0].start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in threads:
            thread.join(2)


def negotiated_version(server_bytes: bytes) -> int:
    """The TLS version in a ServerHello, as it is on the wire (RFC 8446, 4.1.3 and 4.2.1)."""
    assert server_bytes[0] == 22, "the first record is not a handshake"
    assert server_bytes[5] == 2, "the first message is not a ServerHello"
    body = server_bytes[9:]
    legacy = int.from_bytes(body[:2], "big")
    at = 2 + 32
    at += 1 + body[at]  # session id
    at += 2 + 1  # cipher suite, compression
    end = at + 2 + int.from_bytes(body[at : at + 2], "big")
    at += 2
    while at < end:
        kind, length = int.from_bytes(body[at : at + 2], "big"), int.from_bytes(body[at + 2 : at + 4], "big")
        if kind == 43:
            return int.from_bytes(body[at + 4 : at + 4 + length], "big")
        at += 4 + length
    return legacy


def signed_by(parent: Identity) -> Identity:
    """A certificate of its own key under a name that is allowed, signed with the key of `parent`."""
    issuer = x509.load_pem_x509_certificate(parent.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "child")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .sign(load_pem_private_key(parent.key, None), hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Identity(private, certificate.public_bytes(Encoding.PEM) + parent.certificate)


def tls_client(address: str, certificate: bytes, enclave: Identity | None, version, folder) -> ssl.SSLSocket:
    """An ordinary TLS client, limited to one version."""
    context = ssl.create_default_context(cadata=certificate.decode())
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    if enclave is not None:
        (folder / "key").write_bytes(enclave.key)
        (folder / "certificate").write_bytes(enclave.certificate)
        context.load_cert_chain(folder / "certificate", folder / "key")
    host, _, port = address.rpartition(":")
    return context.wrap_socket(socket.create_connection((host, int(port)), timeout=5), server_hostname=WORKER)
