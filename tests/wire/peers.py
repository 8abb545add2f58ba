"""Both ends of a gRPC link for tests: sessions that do simple things, and a worker in a process of its own."""

import gc
import json
import subprocess
import sys
import threading
from contextlib import contextmanager

import torch

from darknight.errors import OpError
from darknight.types import (
    Answer,
    BackwardTask,
    Expected,
    Forget,
    ForwardTask,
    OpSpec,
    Pass,
    Refusal,
    TooLarge,
    Weights,
)
from darknight.wire.grpc_link import connect
from darknight.wire.grpc_seat import WorkerServer
from darknight.wire.identity import ENCLAVE, WORKER, Identity
from darknight.wire.outbox import Outbox
from darknight.wire.seat import GrpcSeat
from darknight.wire.seeds import share_of
from darknight.wire.shared_memory import Host

ABOUT = {"operator": "acme", "device": "cpu", "memory": 1 << 30}


class EchoSession:
    """Answers a forward task with its share plus one; remembers everything that it read."""

    def __init__(self, peer=None, limit=None):
        self.peer = peer
        self.limit = limit
        self.read = []
        self.asked_for = []
        self.closed = threading.Event()
        self.gate = threading.Event()  # computing waits for it
        self.gate.set()
        self.computing = threading.Event()

    def admit(self, nbytes):
        self.asked_for.append(nbytes)
        if self.limit is not None and nbytes > self.limit:
            raise OpError(f"{nbytes} bytes needed and {self.limit} free")

    def serve(self, seat):
        while (found := seat.read()) is not None:
            ticket, message = found
            self.read.append(message)
            if isinstance(message, (ForwardTask, BackwardTask, TooLarge)):
                self.computing.set()
                self.gate.wait(60)
                seat.write(ticket, self.reply(message))
        seat.close()

    def reply(self, message):
        if isinstance(message, TooLarge):
            return Refusal(message=message.reason)
        kinds = [Pass.FORWARD] if isinstance(message, ForwardTask) else message.passes
        tensors = dict.fromkeys(kinds, share_of(message) + 1)
        return Answer(layer=message.layer, call=message.call, tensors=tensors, seconds=0.5)

    def close(self):
        self.closed.set()


class Bench:
    """A server in this process, and whoever connects to it."""

    def __init__(self, make=EchoSession, **options):
        self.worker, self.enclave = Identity.create(WORKER), Identity.create(ENCLAVE)
        self.sessions = []
        self.host = Host()
        self.door = options.get("shared_memory")
        self._make = make
        settings = {"listen": "127.0.0.1:0", "allowed": [self.enclave.certificate], "about": ABOUT, **options}
        self.server = WorkerServer(identity=self.worker, open_session=self._open, **settings)
        self.address = self.server.start()
        self._links = []

    def _open(self, peer):
        self.sessions.append(self._make(peer))
        return self.sessions[-1]

    def connect(self, **options):
        shared = {"host": self.host, "shared_memory": self.door} if self.door else {}
        settings = {"certificate": self.worker.certificate, "identity": self.enclave, **shared, **options}
        self._links.append(connect(self.address, **settings))
        return self._links[-1]

    def close(self):
        for link in self._links:
            link.close()
        for session in self.sessions:
            session.gate.set()
        self.server.stop(2)
        self.host.close()
        for session in self.sessions:
            session.read.clear()
        if self.door:
            gc.collect()  # mappings go with the last tensor in them, and another test may count them


@contextmanager
def bench(make=EchoSession, **options):
    made = Bench(make, **options)
    try:
        yield made
    finally:
        made.close()


def task(call=1, tensor=None, *, keep=False, layer="net.0"):
    tensor = torch.arange(6.0).reshape(2, 3) if tensor is None else tensor
    return ForwardTask(layer=layer, call=call, version=0, tensor=tensor, compute=True, keep=keep)


def backward(call=1, tensor=None, passes=(Pass.GRAD_INPUT, Pass.GRAD_WEIGHT)):
    tensor = torch.ones(2, 3) if tensor is None else tensor
    return BackwardTask(layer="net.0", call=call, version=0, tensor=tensor, passes=passes, x_shape=(2, 3))


def weights(version=0, tensor=None, layer="net.0"):
    tensor = torch.ones(3, 3) if tensor is None else tensor
    return Weights(layer=layer, version=version, op=OpSpec("linear"), prime=None, tensor=tensor)


def expected(message):
    kinds = [Pass.FORWARD] if isinstance(message, ForwardTask) else message.passes
    return Expected(dict.fromkeys(kinds, tuple(message.tensor.shape)), message.tensor.dtype, None)


def ask(link, message):
    return link.ask(message, expected(message))


def everything():
    return Forget(everything=True)


def frames_through_grpc(monkeypatch) -> list:
    """What goes through the streams of links from now on, in both directions, as it goes."""
    seen = []

    def watched(original):
        def watch(self, *arguments):
            for frame in original(self, *arguments):
                seen.append(frame)
                yield frame

        return watch

    monkeypatch.setattr(GrpcSeat, "frames", watched(GrpcSeat.frames))
    monkeypatch.setattr(Outbox, "frames", watched(Outbox.frames))
    return seen


@contextmanager
def worker_process(enclave: Identity, *arguments: str):
    """A worker in a process of its own: (process, address, certificate). It is killed at the end."""
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        process.stdin.write(json.dumps(enclave.certificate.decode()) + "\n")
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
        yield process, said["address"], said["certificate"].encode()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main(shared_memory=None):
    """Serves until the standard input ends."""
    worker = Identity.create(WORKER)
    server = WorkerServer(
        listen="127.0.0.1:0",
        identity=worker,
        allowed=[json.loads(sys.stdin.readline()).encode()],
        about=ABOUT,
        open_session=EchoSession,
        shared_memory=shared_memory,
    )
    print(json.dumps({"address": server.start(), "certificate": worker.certificate.decode()}), flush=True)
    sys.stdin.read()
    server.stop(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
