"""Real workers for tests: a station in this process or a program of its own, and enclaves that connect to them."""

import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from darknight.ops import Linear
from darknight.types import BackwardTask, Expected, ForwardTask, Pass, Weights
from darknight.wire.grpc_link import connect
from darknight.wire.identity import ENCLAVE, WORKER, Identity
from darknight.worker.engine import LocalEngine
from darknight.worker.station import Settings, Station

PRIME = 2**28 - 57
OP = Linear()
MIB = 1 << 20


@dataclass
class Running:
    """A worker that listens, and what an enclave must know of it."""

    address: str
    certificate: bytes
    station: Station

    def connect(self, enclave, **more):
        return Enclave(connect(self.address, certificate=self.certificate, identity=enclave, **more))


@contextmanager
def running(*enclaves, engine=None, **settings):
    """A worker in this process that serves these identities, over real connections."""
    defaults = {"listen": "127.0.0.1:0", "operator": "test", "device": "cpu", "limit": 256 * MIB, "patience": 0.2}
    allowed = [enclave.certificate for enclave in enclaves]
    full = {**defaults, "allowed": allowed, "places": max(1, len(allowed)), **settings}
    identity = Identity.create(WORKER)
    station = Station(Settings(**full), identity, engine or LocalEngine())
    address = station.start()
    try:
        yield Running(address, identity.certificate, station)
    finally:
        station.stop(grace=5.0)


def new_enclave():
    return Identity.create(ENCLAVE)


class Enclave:
    """One link, and the few things that tests ask over it: a linear layer in the field."""

    def __init__(self, link):
        self.link = link

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.link.close()

    def weights(self, tensor, *, layer="a", version=1):
        self.link.post(Weights(layer=layer, version=version, op=OP.spec(), prime=PRIME, tensor=tensor))

    def forward(self, share, out, *, layer="a", call=1, version=1, compute=True, keep=True):
        """The future of the answer; `out`: how many outputs the weights have."""
        task = ForwardTask(layer=layer, call=call, version=version, tensor=share, compute=compute, keep=keep)
        shapes = {Pass.FORWARD: (*share.shape[:-1], out)} if compute else {}
        return self.link.ask(task, Expected(shapes, torch.int32, PRIME))

    def grad_weight(self, delta, x_shape, *, layer="a", call=1, version=1):
        passes = (Pass.GRAD_WEIGHT,)
        task = BackwardTask(layer=layer, call=call, version=version, tensor=delta, passes=passes, x_shape=x_shape)
        return self.link.ask(task, Expected({Pass.GRAD_WEIGHT: (delta.shape[-1], x_shape[-1])}, torch.int32, PRIME))


def residues(*shape, seed=0):
    return torch.randint(0, PRIME, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


class Program:
    """`python -m darknight.worker` in a process of its own, once it serves."""

    def __init__(self, *arguments, python=sys.executable, command=("-m", "darknight.worker"), environment=None, stderr):
        full = [str(python), *command, "--listen", "127.0.0.1:0", *map(str, arguments)]
        self.process = subprocess.Popen(full, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        lines = []
        while not (lines[-3:] and lines[-1] == "'''\n" and len(lines) > 5):
            line = self.process.stdout.readline()
            if not line:
                self.end()
                raise RuntimeError(f"the worker did not start: {lines}")
            lines.append(line)
        self.printed = "".join(lines)
        (self.entry,) = tomllib.loads(self.printed[self.printed.index("[[worker]]") :])["worker"]
        self.certificate = self.entry["certificate"].encode().strip() + b"\n"

    def connect(self, enclave, **more):
        address = self.entry["address"]
        return Enclave(connect(address, certificate=self.certificate, identity=enclave, **more))

    def stop(self, number=signal.SIGTERM, timeout=30):
        """The exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
