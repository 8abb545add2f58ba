"""A running worker: its places for enclaves, its server, and its numbers for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from darknight import __version__
from darknight.errors import FleetError
from darknight.wire import Seat
from darknight.wire.grpc_seat import WorkerServer
from darknight.wire.hostile import Plan
from darknight.wire.identity import Identity
from darknight.wire.segments import SEGMENT
from darknight.worker.engine import Engine
from darknight.worker.metrics import Metrics, MetricsServer
from darknight.worker.session import Sessions

_log = logging.getLogger("darknight.worker")


# Of shared memory, beyond a place's part of the limit: segments are partly empty, and one of each kind is the least.
_HOLES = 4  # a part of the part
_SEGMENTS_ASIDE = 4 * SEGMENT


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a worker is told once, at its start.

    listen, metrics: HOST:PORT; port 0 takes any. pipe_port: as in `WorkerServer`. allowed: certificates (PEM) of the
    enclaves that it serves. limit: bytes for all enclaves together; each of the `places` gets the same part. patience:
    seconds that a new connection waits for a place; a restarted enclave is back before its old connection has ended, if
    that one is in the middle of a task. recording: what is put around the seat of each session. hostile: how to lie,
    for tests.
    """

    listen: str
    operator: str
    device: str
    limit: int
    allowed: Sequence[bytes]
    places: int
    patience: float = 5.0
    pipe_port: int | None = 0
    shared_memory: str | None = None
    metrics: tuple[str, int] | None = None
    recording: Callable[[Seat], Seat] | None = None
    hostile: Plan | None = None


class Station:
    """Serves from `start` to `stop`."""

    def __init__(self, settings: Settings, identity: Identity, engine: Engine) -> None:
        self._settings = settings
        self._identity = identity
        self._engine = engine
        self._healthy = False
        metrics = Metrics()
        share = settings.limit // settings.places
        self._sessions = Sessions(
            engine=engine,
            limit=settings.limit,
            places=settings.places,
            certificates=len(settings.allowed),
            metrics=metrics,
            patience=settings.patience,
            recording=settings.recording,
            hostile=settings.hostile,
        )
        self._server = WorkerServer(
            listen=settings.listen,
            identity=identity,
            allowed=settings.allowed,
            about={"operator": settings.operator, "device": settings.device, "memory": share},
            open_session=self._sessions.open,
            pipe_port=settings.pipe_port,
            shared_memory=settings.shared_memory,
            shared_bytes=share + share // _HOLES + _SEGMENTS_ASIDE,
        )
        self._numbers: MetricsServer | None = None
        self._metrics = metrics

    @property
    def healthy(self) -> bool:
        """Does it serve? False before `start`, and from the moment it is told to stop."""
        return self._healthy

    @property
    def pipe_port(self) -> int | None:
        """Where enclaves are waited for with a pipe, when it has started."""
        return self._server.pipe_port

    @property
    def metrics_address(self) -> str | None:
        return self._numbers.address if self._numbers else None

    def start(self) -> str:
        """The address where it listens, with the real port. Raises FleetError or UsageError in words."""
        try:
            self._start_numbers()
            address = self._server.start()
        except BaseException:
            self._close()
            raise
        self._healthy = True
        fields: dict[str, object] = {
            "version": __version__,
            "address": address,
            "pipe_port": self.pipe_port,
            "operator": self._settings.operator,
            "device": self._settings.device,
            "memory_limit": self._settings.limit,
            "enclaves": self._settings.places,
            "fingerprint": self._identity.fingerprint,
        }
        if self.metrics_address:
            fields["metrics"] = self.metrics_address
        _log.info("started", extra={"fields": fields})
        if self._settings.hostile is not None:
            told = {"plan": self._settings.hostile.text}
            _log.warning("HOSTILE: this worker lies on purpose, which is for tests only", extra={"fields": told})
        return address

    def _start_numbers(self) -> None:
        if self._settings.metrics is None:
            return
        host, port = self._settings.metrics
        try:
            self._numbers = MetricsServer(host, port, self._metrics, lambda: self._healthy)
        except OSError as error:
            raise FleetError(
                f"--metrics {host}:{port}: cannot listen there: {error.strerror}. Use another port, or stop what "
                "listens there."
            ) from None

    def stop(self, grace: float) -> int:
        """No new sessions; tasks that are under way are finished and answered, for at most `grace` seconds.

        How many were not finished by then: their threads still compute, and nobody waits for them.
        """
        self._healthy = False
        _log.info("stopping", extra={"fields": {"grace": grace}})
        self._server.stop(grace)
        left = self._sessions.count
        self._close()
        _log.info("stopped", extra={"fields": {"tasks_cut_off": left}})
        return left

    def _close(self) -> None:
        if self._numbers is not None:
            self._numbers.close()
            self._numbers = None
        self._engine.close()
