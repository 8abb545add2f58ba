"""What a worker counts, for Prometheus: /metrics and /healthz over plain HTTP.

Leaks: numbers of tasks, bytes and seconds, by the pass only. No label comes from an enclave: no layer, no call, no
certificate. Whoever may read the numbers learns how busy the worker is; listen on a loopback or private address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from darknight.types import Pass

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """The numbers of one worker process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tasks = Counter(
            "darknight_worker_tasks", "Tasks, by pass and outcome.", ["pass", "outcome"], registry=self.registry
        )
        # A series that exists from the start is easier to watch, and need not be looked for at every task.
        kinds = (*(kind.value for kind in Pass), "keep", "too_large")
        self.outcomes = {each: self.tasks.labels(*each) for each in product(kinds, ("done", "refused"))}
        self.seconds = Histogram(
            "darknight_worker_task_seconds", "Seconds of computing, a task.", buckets=_SECONDS, registry=self.registry
        )
        self.received = Counter("darknight_worker_received_bytes", "Bytes of tensors received.", registry=self.registry)
        self.sent = Counter("darknight_worker_sent_bytes", "Bytes of tensors sent.", registry=self.registry)
        self.sessions = Gauge("darknight_worker_sessions", "Enclaves that are connected.", registry=self.registry)
        self.turned_away = Counter(
            "darknight_worker_sessions_refused",
            "Sessions refused for want of a place.",
            registry=self.registry,
        )
        self.held = Gauge("darknight_worker_held_bytes", "Bytes of weights and shares kept.", registry=self.registry)
        self.limit = Gauge("darknight_worker_memory_limit_bytes", "The memory limit.", registry=self.registry)


class MetricsServer:
    """HTTP at `host:port`: /metrics, and /healthz that says 200 while `healthy()` and 503 otherwise."""

    def __init__(self, host: str, port: int, metrics: Metrics, healthy: Callable[[], bool]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # a client that says nothing holds no thread for long
            server_version = "darknight-worker"
            sys_version = ""

            def do_GET(self) -> None:
                match self.path.partition("?")[0]:
                    case "/metrics":
                        self._answer(200, generate_latest(metrics.registry), CONTENT_TYPE_LATEST)
                    case "/healthz" if healthy():
                        self._answer(200, b"serving\n", "text/plain")
                    case "/healthz":
                        self._answer(503, b"stopping\n", "text/plain")
                    case _:
                        self._answer(404, b"here are /metrics and /healthz\n", "text/plain")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are no news."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        bound_host, bound_port = self._server.server_address[:2]
        self.address = f"{bound_host!s}:{bound_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
