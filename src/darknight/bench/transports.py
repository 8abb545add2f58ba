"""What the transports cost, against the least that they could cost, in one run on this machine.

All ways of reaching a worker are timed through a real worker process and the real link, 64 MiB there and 64 MiB back,
less the seconds that the worker says it computed. Beside them, taking turns, so that a busy moment hits all alike:

- a plain copy of the same bytes: into memory that was used before, and out of it into fresh memory. That is what an
  enclave must do at least: a worker's memory cannot be trusted to stay as it was checked;
- a raw TLS 1.3 socket to another process that sends everything back.
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from darknight.bench import tls_echo
from darknight.bench.echo import Echo
from darknight.errors import FleetError
from darknight.fleet.local import door_name, open_local
from darknight.fleet.nursery import Berth, Nursery
from darknight.wire.identity import ENCLAVE, WORKER, Identity
from darknight.wire.shared_memory import Host


@dataclass(frozen=True, kw_only=True)
class Transports:
    """Seconds for `nbytes` there and back, the best of `times`.

    pipe: frames through a sealed pipe, as between machines; grpc_tls: where none can be had. own_*: of this process's
    processor, all its threads, without the other end.
    """

    nbytes: int
    times: int
    copy: float
    shared_memory: float
    tls_socket: float
    pipe: float
    grpc_tls: float
    own_shared_memory: float
    own_pipe: float
    own_grpc_tls: float

    @property
    def shared_memory_ratio(self) -> float:
        return self.shared_memory / self.copy

    @property
    def pipe_ratio(self) -> float:
        return self.pipe / self.tls_socket

    @property
    def grpc_tls_ratio(self) -> float:
        return self.grpc_tls / self.tls_socket


def measure_transports(nbytes: int, *, times: int = 5) -> Transports:
    """Starts a worker of each kind and a raw TLS echo, and times all, `times` rounds; the best of each counts."""
    with ExitStack() as stack:
        runs = [
            _plain_copy(nbytes),
            *stack.enter_context(_workers(nbytes)),
            stack.enter_context(_tls_socket(nbytes)),
        ]
        shortest, own = [float("inf")] * len(runs), [float("inf")] * len(runs)
        for _ in range(times):
            for place, run in enumerate(runs):
                begun = time.process_time()
                shortest[place] = min(shortest[place], run())
                own[place] = min(own[place], time.process_time() - begun)
    copy, shared_memory, pipe, grpc_tls, tls_socket = shortest
    return Transports(
        nbytes=nbytes,
        times=times,
        copy=copy,
        shared_memory=shared_memory,
        tls_socket=tls_socket,
        pipe=pipe,
        grpc_tls=grpc_tls,
        own_shared_memory=own[1],
        own_pipe=own[2],
        own_grpc_tls=own[3],
    )


def _plain_copy(nbytes: int) -> Callable[[], float]:
    source = torch.ones(nbytes, dtype=torch.uint8)
    place = torch.zeros_like(source)

    def run() -> float:
        begun = time.perf_counter()
        place.copy_(source)
        place.clone()
        return time.perf_counter() - begun

    return run


@contextmanager
def _workers(nbytes: int) -> Iterator[list[Callable[[], float]]]:
    """A worker that is reached through shared memory, one through a pipe, and one through gRPC with TLS alone."""
    identity = Identity.create(ENCLAVE)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    doors = (door_name(identity, 0), None, None)
    berths = [Berth(operator=f"simulated-{j}", threads=threads, shared_memory=door) for j, door in enumerate(doors)]
    nursery = Nursery(berths, enclave=identity.certificate)
    with ExitStack() as stack:
        stack.callback(nursery.stop)
        nursery.wait()
        host = stack.enter_context(closing(Host()))
        links = [
            open_local(nursery, j, identity, host if door else None, door, pipe=j == 1) for j, door in enumerate(doors)
        ]
        echoes = [Echo(stack.enter_context(closing(link)), nbytes) for link in links]
        yield [partial(_seconds, echo) for echo in echoes]


def _seconds(echo: Echo) -> float:
    return echo.run().seconds


@contextmanager
def _tls_socket(nbytes: int) -> Iterator[Callable[[], float]]:
    identity = Identity.create(WORKER)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        files = {"certificate.pem": identity.certificate, "key.pem": identity.key}
        for name, content in files.items():
            Path(folder, name).write_bytes(content)  # the folder is ours alone, and the key is of no other use
        command = [sys.executable, "-I", tls_echo.__file__, *(str(Path(folder, name)) for name in files)]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL))
        stack.callback(process.kill)
        assert process.stdout is not None
        port = process.stdout.readline()
        if not port:
            raise FleetError("the other end of the raw TLS socket did not start; its words are above.")
        context = ssl.create_default_context(cadata=identity.certificate.decode())
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        plain = socket.create_connection(("127.0.0.1", int(port)), timeout=60)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = stack.enter_context(context.wrap_socket(plain, server_hostname=WORKER))
        source = _bytes_of(torch.ones(nbytes, dtype=torch.uint8))

        def run() -> float:
            begun = time.perf_counter()
            connection.sendall(nbytes.to_bytes(8, "little"))
            connection.sendall(source)
            if not tls_echo.received(connection, _bytes_of(torch.empty(nbytes, dtype=torch.uint8))):
                raise FleetError("the raw TLS socket ended while it was measured. Run the measurement again.")
            return time.perf_counter() - begun

        yield run


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().data
