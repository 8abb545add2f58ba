"""Several workers on one machine from one start: ``python -m darknight.worker.nursery``, for dk.local_fleet.

It loads everything once and forks a process for each worker, because loading torch takes seconds. It is told what to do
on its standard input and reports on its standard output, a JSON object a line:

    in   {"workers": [{"operator": ..., "shared_memory": ..., "record_fd": ..., "threads": ..., "memory_limit": ...,
          "hostile": ...}, ...], "allow_enclave": certificate, "parent": pid}          first, and once
    in   {"restart": j}                                               worker j again, with a new key
    out  {"worker": j, "pid": ..., "address": ..., "certificate": ...}   worker j serves
    out  {"worker": j, "exited": code}                                worker j ended by itself; negative: a signal

Guarantees: no worker outlives whoever started this. When the standard input ends, or the process `parent` does, the
workers are killed; when the nursery itself is killed, the kernel kills them. Ctrl-C is the parent's to handle: it
reaches every process of a terminal, and is ignored here. Contract tests: tests/worker/test_nursery.py.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from darknight.errors import UsageError
from darknight.memory import keep
from darknight.wire import Seat
from darknight.wire.hostile import Plan, require_insecure
from darknight.wire.identity import WORKER, Identity
from darknight.wire.recording import RecordingSeat
from darknight.worker.choice import MEASURED, VARIABLE
from darknight.worker.engine import LocalEngine
from darknight.worker.logs import set_up_logs
from darknight.worker.machine import available_memory, open_more_files, wall_off
from darknight.worker.station import Settings, Station

_LONGEST_LINE = 1 << 20
_POLITE = 10  # the enclave goes first: while it computes, workers would only wait for what it sends next
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class _OrderError(Exception):
    """A line that makes no sense, and why."""


@dataclass(frozen=True, kw_only=True)
class Berth:
    """What one worker is started with."""

    operator: str
    shared_memory: str | None
    record_fd: int | None
    threads: int | None
    memory_limit: int | None
    hostile: Plan | None


@dataclass(frozen=True, kw_only=True)
class Order:
    workers: tuple[Berth, ...]
    allow_enclave: bytes
    parent: int


def main() -> int:
    """Runs until the standard input or the parent ends. Exit codes: 0, or 1 for an order that makes no sense."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the workers follow: see _child
    os.nice(_POLITE)
    set_up_logs("warning", "text")
    open_more_files()
    lines = _Lines(sys.stdin.fileno())
    try:
        first = None
        while first is None:
            lines.read()
            if lines.ended:
                return 0
            first = next(iter(lines), None)
        _Nursery(_order(first), lines).run()
    except _OrderError as error:
        print(f"darknight nursery: error: {error}", file=sys.stderr)
        return 1
    return 0


class _Lines:
    """The standard input, line by line, without waiting for a line to be complete."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.ended = False
        self._buffer = b""

    def read(self) -> None:
        """Reads what is there; waits for something if nothing is."""
        part = os.read(self.descriptor, 1 << 16)
        self.ended = not part
        self._buffer += part
        if len(self._buffer) > _LONGEST_LINE:
            raise _OrderError(f"a line of more than {_LONGEST_LINE} bytes.")

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> dict[str, object]:
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            raise StopIteration
        self._buffer = rest
        try:
            found = json.loads(line)
        except ValueError:
            raise _OrderError("a line that is not JSON.") from None
        if not isinstance(found, dict):
            raise _OrderError("a line that is not a JSON object.")
        return found


class _Nursery:
    """The parent of all workers. It has one thread and uses no gRPC: both would be broken in a fork."""

    def __init__(self, order: Order, lines: _Lines) -> None:
        self._order = order
        self._lines = lines
        self._pid = os.getpid()
        self._children: dict[int, tuple[int, int]] = {}  # worker -> (pid, pidfd)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        try:
            parent = os.pidfd_open(self._order.parent)
        except OSError:  # it is gone already
            return
        # The pipe alone is not enough: a child that the parent forked may still hold its other end.
        self._selector.register(parent, selectors.EVENT_READ, None)
        self._selector.register(self._lines.descriptor, selectors.EVENT_READ, self._told)
        gc.freeze()  # what was loaded stays shared between the workers
        try:
            for worker in range(len(self._order.workers)):
                self._start(worker)
            while not self._lines.ended:
                for key, _ in self._selector.select():
                    if key.data is None:
                        return
                    key.data()
        finally:
            for worker in list(self._children):
                self._end(worker)

    def _told(self) -> None:
        self._lines.read()
        for line in self._lines:
            worker = line.get("restart")
            if line.keys() != {"restart"} or type(worker) is not int or not 0 <= worker < len(self._order.workers):
                raise _OrderError('something else than {"restart": number of a worker}.')
            self._end(worker)
            self._start(worker)

    def _start(self, worker: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _child(self._order, worker, self._pid)
        descriptor = os.pidfd_open(pid)
        self._children[worker] = (pid, descriptor)
        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._exited, worker, pid))

    def _exited(self, worker: int, pid: int) -> None:
        if self._children[worker][0] == pid:  # else it was replaced in the same round
            _report({"worker": worker, "exited": self._reap(worker)})

    def _end(self, worker: int) -> None:
        """Kills a worker that still runs. It has nothing to save, and nobody waits for it any more."""
        if worker in self._children:
            os.kill(self._children[worker][0], signal.SIGKILL)  # not reaped yet, so the number is still its own
            self._reap(worker)

    def _reap(self, worker: int) -> int:
        pid, descriptor = self._children.pop(worker)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- in the worker's process ------------------------------------------------------------------------------------------
def _child(order: Order, worker: int, nursery: int) -> NoReturn:
    """One worker, until it is killed. It never returns to the nursery's code."""
    try:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != nursery:  # it died before the kernel was told
            os._exit(1)
        _let_go_of_what_is_not_ours(order, worker)
        _serve(order, worker)
        while True:
            signal.pause()
    except Exception as error:
        words = " ".join(str(error).split())
        print(f"darknight worker {worker}: error: {type(error).__name__}: {words}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _let_go_of_what_is_not_ours(order: Order, worker: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())  # the nursery's orders
    os.close(nothing)
    for number, berth in enumerate(order.workers):
        if number != worker and berth.record_fd is not None:
            os.close(berth.record_fd)  # what other workers saw is written there


def _serve(order: Order, worker: int) -> None:
    berth = order.workers[worker]
    if berth.hostile is not None:
        set_up_logs("info", "text")  # each lie
    # All of this machine is here to try things out with, but for what the enclave itself needs.
    limit = berth.memory_limit or available_memory() * 3 // 4 // len(order.workers)
    engine = LocalEngine(torch.device("cpu"), berth.threads, os.environ.get(VARIABLE, MEASURED))
    wall_off(limit)
    keep(limit)
    recording: Callable[[Seat], Seat] | None = None
    if berth.record_fd is not None:
        recording = partial(RecordingSeat, sock=socket.socket(fileno=berth.record_fd))
    settings = Settings(
        listen="127.0.0.1:0",
        operator=berth.operator,
        device="cpu",
        limit=limit,
        allowed=[order.allow_enclave],
        places=1,
        pipe_port=0 if berth.shared_memory is None else None,
        shared_memory=berth.shared_memory,
        recording=recording,
        hostile=berth.hostile,
    )
    identity = Identity.create(WORKER)  # it lives as long as this process
    address = Station(settings, identity, engine).start()
    certificate = identity.certificate.decode()
    _report({"worker": worker, "pid": os.getpid(), "address": address, "certificate": certificate})


def _report(line: dict[str, object]) -> None:
    """In one write, which is whole: all processes share this pipe."""
    with suppress(OSError):  # nobody listens any more; the end of the standard input follows
        os.write(sys.stdout.fileno(), f"{json.dumps(line)}\n".encode())


# --- orders -----------------------------------------------------------------------------------------------------------
def _order(found: dict[str, object]) -> Order:
    workers, allowed, parent = found.get("workers"), found.get("allow_enclave"), found.get("parent")
    if found.keys() != {"workers", "allow_enclave", "parent"} or not isinstance(workers, list):
        raise _OrderError("an order with other keys than workers, allow_enclave, parent.")
    if not isinstance(allowed, str) or type(parent) is not int:
        raise _OrderError("an order without the enclave's certificate, or without the number of its process.")
    return Order(workers=tuple(_berth(entry) for entry in workers), allow_enclave=allowed.encode(), parent=parent)


def _berth(found: object) -> Berth:
    keys = {"operator", "shared_memory", "record_fd", "threads", "memory_limit", "hostile"}
    if not isinstance(found, dict) or found.keys() != keys or not isinstance(found["operator"], str):
        raise _OrderError(f"a worker with other keys than {', '.join(sorted(keys))}.")
    numbers = [found["record_fd"], found["threads"], found["memory_limit"]]
    if not all(number is None or type(number) is int for number in numbers):
        raise _OrderError("a worker whose record_fd, threads or memory_limit is not a whole number.")
    if found["shared_memory"] is not None and not isinstance(found["shared_memory"], str):
        raise _OrderError("a worker whose shared_memory is not a name.")
    return Berth(**{**found, "hostile": _plan(found["hostile"])})


def _plan(text: object) -> Plan | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise _OrderError("a worker whose hostile plan is not a text.")
    try:
        require_insecure(os.environ)
        return Plan.parse(text)
    except UsageError as error:
        raise _OrderError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
