"""The workers of one scheme: work goes out to all of them at once, answers come back checked for shape and range.

Guarantees: an answer that leaves this room has exactly the shapes, the dtype and the range that the enclave fixed
    beforehand; anything else raises WorkerError, which names the worker (contract test: tests/fleet/test_fleet.py).
Assumes: nothing of the workers. Whether an answer is *right* is decided in darknight.integrity.
Leaks: to each worker its own messages, their number, order and timing.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType

import torch
from torch import Tensor

from darknight.errors import FleetError, WorkerError
from darknight.types import Answer, Expected, Forget, Message, Record, Refusal, Task
from darknight.wire import Link, LinkClosed, LinkTimeout, Transcript

PATIENCE = 600.0  # seconds a worker may take for one task


class Fleet:
    """Workers by number, the scheme's worker index. Close it, or use it as a context.

    operators: who runs each worker; the guarantee counts operators, because one operator pools what its workers see.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        operators: Sequence[str],
        transcripts: Sequence[Transcript] | None = None,
    ) -> None:
        if len(operators) != len(links):
            raise FleetError(f"{len(operators)} operators for {len(links)} workers; needs one for each worker.")
        self.operators = tuple(operators)
        self._links = tuple(links)
        self._transcripts = transcripts
        self._stop: Callable[[], object] | None = None
        self._closed = False
        self._runtime: weakref.ref[object] | None = None
        self._owner = threading.Lock()

    @property
    def workers(self) -> int:
        return len(self._links)

    @property
    def closed(self) -> bool:
        return self._closed

    def __repr__(self) -> str:
        return f"<Fleet: {self.workers} workers{', closed' if self._closed else ''}>"

    def post(self, message: Message, workers: Sequence[int]) -> None:
        """Sends a message that has no answer."""
        for worker in workers:
            self._send(worker, message)

    def dispatch(self, tasks: Mapping[int, Task], expected: Mapping[int, Expected]) -> dict[int, Answer]:
        """Sends every worker its task and waits for all answers, which are as `expected`."""
        tickets = {worker: self._send(worker, task) for worker, task in tasks.items()}
        deadline = time.monotonic() + PATIENCE
        answers = {}
        for worker, ticket in tickets.items():
            try:
                reply = self._links[worker].receive(ticket, deadline - time.monotonic())
            except LinkTimeout:
                raise WorkerError(f"worker {worker} did not answer in {PATIENCE:.0f} s.", worker=worker) from None
            except LinkClosed:
                raise self._gone(worker) from None
            if isinstance(reply, Refusal):
                raise WorkerError(f"worker {worker} refused: {_quoted(reply.message)}", worker=worker)
            answers[worker] = self._checked(worker, reply, expected[worker])
        return answers

    def attach(self, runtime: object) -> None:
        """`runtime` works with this fleet from now on, alone: workers know calls and layers by its names for them."""
        with self._owner:
            current = self._runtime() if self._runtime is not None else None
            if current is not None and current is not runtime:
                raise FleetError("this fleet works for another runtime. Close that one first, or start another fleet.")
            self._forget_everything()  # of a runtime that was dropped without being closed
            self._runtime = weakref.ref(runtime)

    def detach(self, runtime: object) -> None:
        """`runtime` is done: workers forget everything that it sent them. Nothing happens if it is not attached."""
        with self._owner:
            if self._runtime is not None and self._runtime() is runtime:
                if not self._closed:
                    self._forget_everything()
                self._runtime = None

    def _forget_everything(self) -> None:
        for worker in range(self.workers):
            with suppress(WorkerError):  # one that is gone remembers nothing
                self._send(worker, Forget(everything=True))

    def transcript(self, worker: int) -> list[Record]:
        """Every tensor that `worker` received and sent so far, as it was on the wire."""
        if self._transcripts is None:
            raise FleetError("this fleet keeps no transcripts. Start it with local_fleet(scheme, record=True).")
        if not 0 <= worker < self.workers:
            raise FleetError(f"no worker {worker}; this fleet has workers 0 to {self.workers - 1}.")
        return self._transcripts[worker].records

    def on_close(self, stop: Callable[[], object]) -> None:
        """What ends workers that were started for this fleet; `close` calls it once."""
        self._stop = stop

    def close(self) -> None:
        """Stops the workers. Transcripts stay."""
        if not self._closed:
            self._closed = True
            for link in self._links:
                link.close()
            if self._stop is not None:
                self._stop()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, worker: int, message: Message) -> int:
        if self._closed:
            raise FleetError("the fleet is closed. Use the model inside the fleet's context, or unprotect it.")
        try:
            return self._links[worker].send(message)
        except LinkClosed:
            raise self._gone(worker) from None

    @staticmethod
    def _gone(worker: int) -> WorkerError:
        return WorkerError(f"worker {worker} stopped. Close the fleet, start another, repeat the step.", worker=worker)

    @staticmethod
    def _checked(worker: int, answer: Answer, expected: Expected) -> Answer:
        if not _has_form(answer) or answer.tensors.keys() != expected.shapes.keys():
            raise WorkerError(f"worker {worker} answered another question than the one asked.", worker=worker)
        for kind, shape in expected.shapes.items():
            complaint = _complaint(answer.tensors[kind], shape, expected)
            if complaint:
                raise WorkerError(f"worker {worker}, {kind.value}: an answer {complaint}.", worker=worker)
        return answer


def _has_form(answer: object) -> bool:
    """Whether this is an answer at all: dense tensors here, and a plausible number of seconds."""
    return (
        isinstance(answer, Answer)
        and isinstance(answer.tensors, Mapping)
        and all(type(t) is Tensor and t.layout == torch.strided and t.is_cpu for t in answer.tensors.values())
        and isinstance(answer.seconds, float)
        and 0 <= answer.seconds <= PATIENCE
    )


def _quoted(text: object) -> str:
    """A worker's words, harmless to a terminal and not too long."""
    return "".join(sign if sign.isprintable() else " " for sign in str(text)[:300]) or "it gave no reason"


def _complaint(tensor: Tensor, shape: tuple[int, ...], expected: Expected) -> str:
    if tuple(tensor.shape) != shape:
        return f"of shape {tuple(tensor.shape)}; needs {shape}"
    if tensor.dtype != expected.dtype:
        return f"of {tensor.dtype}; needs {expected.dtype}"
    if not tensor.numel():
        return ""
    if expected.prime is None:
        return "" if bool(torch.isfinite(tensor).all()) else "with values that are not finite"
    least, most = torch.aminmax(tensor)
    return "" if int(least) >= 0 and int(most) < expected.prime else "with values outside the field"
