"""The worker's program: ``python -m darknight.worker``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from darknight import __version__
from darknight.errors import DarKnightError, FleetError, UsageError
from darknight.memory import keep
from darknight.wire.identity import CERTIFICATE_FILE, KEY_FILE, WORKER, Identity, lock_alone, read_certificate
from darknight.worker.budget import size_in_words
from darknight.worker.engine import Engine, LocalEngine, device_named
from darknight.worker.logs import set_up_logs
from darknight.worker.machine import available_memory, open_more_files, wall_off
from darknight.worker.options import PROGRAM, Options, read_options
from darknight.worker.ray_engine import RayEngine
from darknight.worker.station import Settings, Station

_log = logging.getLogger("darknight.worker")

STOPPED, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_PLACES = 4  # or so: the same number for each certificate
_LEAST_STORE = 128 << 20  # bytes that Ray wants for its objects at least


def main(argv: list[str] | None = None) -> int:
    """Runs a worker until a signal ends it; returns the exit code."""
    try:
        options = read_options(argv)
    except SystemExit as end:  # argparse: --help, --version, or a mistake that it has explained
        return end.code if isinstance(end.code, int) else USAGE
    set_up_logs(options.log_level, options.log_format)
    open_more_files()
    try:
        with _Signals() as signals:
            return _run(options, signals)
    except UsageError as error:
        return _complain(error, USAGE)
    except (DarKnightError, OSError, RuntimeError) as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:  # before the signals were ours, or after
        return INTERRUPTED


def _complain(error: Exception, code: int) -> int:
    print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _run(options: Options, signals: _Signals) -> int:
    device = device_named(options.device)
    allowed = _certificates(options.allow_enclave)
    identity = Identity.load_or_create(options.state, WORKER)
    with _key_in_use(options.state):
        return _work(options, signals, device, allowed, identity)


@contextlib.contextmanager
def _key_in_use(state: Path) -> Iterator[None]:
    """One key is one worker. The lock is on the key's file, and the kernel releases it however this process ends."""
    descriptor = os.open(state / KEY_FILE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not lock_alone(descriptor):
            raise FleetError(
                f"another worker runs with --state {state}, and a key belongs to one worker. Give this one a folder of "
                "its own with --state, or stop the other one."
            )
        yield
    finally:
        os.close(descriptor)


def _work(options: Options, signals: _Signals, device: torch.device, allowed: list[bytes], identity: Identity) -> int:
    limit = _memory_limit(options)
    engine = _engine(options, device, limit)
    settings = Settings(
        listen=options.listen,
        pipe_port=options.pipe_port,
        operator=options.operator,
        device=str(device) if options.engine == "local" else "ray",
        limit=limit,
        allowed=allowed,
        places=options.enclaves or max(1, _PLACES // len(allowed)) * len(allowed),
        shared_memory=_absolute(options.shared_memory),
        metrics=options.metrics,
        hostile=options.hostile,
    )
    if device.type == "cpu":  # the drivers of other devices reserve address space as they like
        wall_off(limit)
        keep(limit)
    station = Station(settings, identity, engine)
    try:
        address = station.start()
    except UsageError as error:  # right in itself, but the port is taken
        raise FleetError(str(error)) from None
    _announce(options, settings, identity, engine, address, station)
    number = signals.wait()
    code = INTERRUPTED if number == signal.SIGINT else STOPPED
    if station.stop(options.grace):  # Python would wait for no such thread, and abort because it still computes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _memory_limit(options: Options) -> int:
    there = available_memory()
    if options.memory_limit is not None and options.memory_limit > there:
        fields = {"memory_limit": options.memory_limit, "available": there}
        _log.warning("--memory-limit is more than this machine or its control group has", extra={"fields": fields})
    return options.memory_limit or there // 2


def _certificates(paths: tuple[Path, ...]) -> list[bytes]:
    found: dict[bytes, Path] = {}
    for path in paths:
        certificate = read_certificate(path)
        if certificate in found:
            raise UsageError(f"--allow-enclave: {path} is the same certificate as {found[certificate]}. Name it once.")
        found[certificate] = path
    return list(found)


def _absolute(door: str | None) -> str | None:
    """A path as the enclave can use it too; a name that begins with @ is no path."""
    return door if door is None or door.startswith("@") else str(Path(door).absolute())


def _engine(options: Options, device: torch.device, limit: int) -> Engine:
    if options.engine == "ray":
        return RayEngine(options.ray_address, actors=options.ray_actors, object_store=max(limit, _LEAST_STORE))
    return LocalEngine(device, options.threads, options.strategy)


def _announce(
    options: Options, settings: Settings, identity: Identity, engine: Engine, address: str, station: Station
) -> None:
    """What the operator needs to know, and to send, on stdout."""
    pipes, metrics = station.pipe_port, station.metrics_address
    places = f"{_counted(settings.places, 'enclave')} at once"
    threads = _counted(torch.get_num_threads(), "thread")
    hands = _counted(engine.actors, "actor") if isinstance(engine, RayEngine) else threads
    rows = [
        ("listening", address),
        *([("pipes", f"port {pipes}")] if pipes else []),
        ("operator", settings.operator),
        ("computing", f"{settings.device}, {hands}"),
        *([("strategy", engine.choice.words)] if isinstance(engine, LocalEngine) else []),
        ("memory", f"{size_in_words(settings.limit)} for {places}"),
        ("certificate", str((options.state / CERTIFICATE_FILE).absolute())),
        ("fingerprint", identity.fingerprint),
        *([("metrics", f"http://{metrics}/metrics")] if metrics else []),
        *([("shared memory", settings.shared_memory)] if settings.shared_memory else []),
    ]
    entry = [
        "[[worker]]",
        f"address = {_toml(_reachable(address))}",
        f"operator = {_toml(settings.operator)}",
        *([f"shared_memory = {_toml(settings.shared_memory)}"] if settings.shared_memory else []),
        f"certificate = '''\n{identity.certificate.decode().strip()}\n'''",
    ]
    lines = [
        f"darknight worker {__version__}",
        *([f"  {'HOSTILE':<14}it lies on purpose: {settings.hostile.text}"] if settings.hostile else []),
        *(f"  {name:<14}{value}" for name, value in rows),
        "",
        "For the enclave's fleet file; its owner should compare the fingerprint with you over another channel:",
        "",
        *entry,
    ]
    with contextlib.suppress(OSError):  # nobody has to read it
        print("\n".join(lines), flush=True)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _reachable(address: str) -> str:
    """The address as another machine would write it, as far as this one knows."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]", "::", "") else address


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a basic string of TOML is written as one of JSON


class _Signals:
    """SIGTERM and SIGINT ask for a stop; the second one ends the program where it stands.

    Python runs handlers in the main thread, and the kernel may hand a signal to any other one: a main thread that waits
    for a lock would then sleep on. So the number of a signal goes through a socket, whichever thread it reached, to a
    thread that does nothing but read it.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._before: dict[signal.Signals, object] = {}
        self._fd_before = -1
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)

    def __enter__(self) -> _Signals:
        self._fd_before = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._listen, name="darknight-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._fd_before)
        self._told.close()  # the thread ends

    def wait(self) -> int:
        """The first signal's number."""
        return self._asked.get()

    def _listen(self) -> None:
        with self._heard:
            asked = False
            while heard := self._heard.recv(1):
                if heard[0] not in self._before:  # another signal that somebody in this process handles
                    continue
                if asked:
                    os._exit(INTERRUPTED if heard[0] == signal.SIGINT else FAILED)
                asked = True
                self._asked.put(heard[0])
