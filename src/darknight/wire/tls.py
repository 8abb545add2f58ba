"""gRPC with mutual TLS 1.3: the settings that both ends share. Every other file takes `grpc` from here.

gRPC has no setting for the least TLS version, and it reads its environment when it is imported. It offers TLS 1.2 with
the cipher suites named there, and TLS 1.3 always. The one suite that we name needs an RSA certificate; ours are ECDSA.
So TLS 1.2 has nothing to agree on, and only TLS 1.3 is left.

Guarantees: if TLS13_ONLY is true, a server made here speaks TLS 1.3 and nothing older; a worker does not start without
(contract tests: tests/wire/test_grpc.py::test_only_tls_1_3_is_spoken,
tests/wire/test_grpc.py::test_a_worker_does_not_start_where_tls_1_2_is_possible).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from darknight.wire.codec import CHUNK
from darknight.wire.identity import WORKER, Identity

_SUITE = "ECDHE-RSA-AES256-GCM-SHA384"
TLS13_ONLY = "grpc" not in sys.modules or os.environ.get("GRPC_SSL_CIPHER_SUITES") == _SUITE
if "grpc" not in sys.modules:
    os.environ["GRPC_SSL_CIPHER_SUITES"] = _SUITE
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core writes to stderr, between our own lines

import grpc  # type: ignore[import-untyped]  # noqa: E402

__all__ = [
    "CLIENT_OPTIONS",
    "METHOD",
    "SERVER_OPTIONS",
    "SERVICE",
    "TLS13_ONLY",
    "client_credentials",
    "grpc",
    "server_credentials",
]

SERVICE = "darknight.Worker"
METHOD = "Link"

_SILENCE = 15_000  # milliseconds until a silent peer is asked for a sign of life, and how long it has to give one
_HELLO = 10_000  # milliseconds for a connection to become a stream

_OPTIONS = [
    ("grpc.max_receive_message_length", CHUNK),
    ("grpc.max_send_message_length", CHUNK),
    ("grpc.per_message_decompression", 0),  # a small message must not become a large one
    ("grpc.keepalive_time_ms", _SILENCE),
    ("grpc.keepalive_timeout_ms", _SILENCE),
    ("grpc.http2.ping_timeout_ms", _SILENCE),  # of pings that measure the connection; one may be in the way of ours
    ("grpc.http2.max_pings_without_data", 0),  # no limit
]
CLIENT_OPTIONS = [
    *_OPTIONS,
    ("grpc.ssl_target_name_override", WORKER),  # the certificate says which worker it is, not the address
    ("grpc.use_local_subchannel_pool", 1),  # links share nothing
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
]
SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second worker on the same port is a mistake
    ("grpc.server_handshake_timeout_ms", _HELLO),
    ("grpc.max_connection_idle_ms", _HELLO),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.http2.min_ping_interval_without_data_ms", _SILENCE // 2),
]


def client_credentials(identity: Identity, certificate: bytes) -> object:
    """The enclave's: `certificate` of the worker is the only one that is accepted."""
    return grpc.ssl_channel_credentials(certificate, identity.key, identity.certificate)


def server_credentials(identity: Identity, allowed: Sequence[bytes]) -> object:
    """The worker's: only holders of these certificates are let in."""
    pair = [(identity.key, identity.certificate)]
    return grpc.ssl_server_credentials(pair, b"\n".join(allowed), require_client_auth=True)
