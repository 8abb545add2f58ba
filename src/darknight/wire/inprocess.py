"""Both ends in one process, with a queue for each direction.

Every tensor is copied as it is sent, in both directions, as a real transport would: a share is a part of a tensor that
holds all shares, and the enclave's own weights check the answers. Whoever receives gets memory of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue

import torch

from darknight.types import Answer, Expected, Forget, Message, Refusal, Reply, Task, Weights
from darknight.wire.link import LinkClosed, LinkError, Misbehaved, Refused
from darknight.wire.seeds import shadow
from darknight.wire.transcript import Transcript


def in_process(transcript: Transcript | None = None) -> tuple[InProcessLink, InProcessSeat]:
    """The two ends of a new link; the seat writes down in `transcript` what it reads and writes."""
    inbox: SimpleQueue[tuple[int, Message] | None] = SimpleQueue()
    link = InProcessLink(inbox)
    return link, InProcessSeat(inbox, link, transcript)


class InProcessLink:
    """The enclave's end."""

    takes_seeds = True
    shares_memory = True

    def __init__(self, inbox: SimpleQueue[tuple[int, Message] | None]) -> None:
        self._inbox = inbox
        self._lock = threading.Lock()
        self._tickets = 0
        self._open: dict[int, tuple[Future[Answer], Expected]] = {}
        self.failure: LinkError | None = None

    def post(self, message: Weights | Forget) -> None:
        with self._lock:
            self._put(message if isinstance(message, Forget) else _copied(message))

    def ask(self, task: Task, expected: Expected) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._lock:
            self._open[self._tickets + 1] = (future, expected)  # before anybody can answer
            self._put(_copied(task))
        return future

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Everything is copied."""

    def _put(self, message: Message) -> None:
        if self.failure is not None:
            raise self.failure
        self._tickets += 1
        self._inbox.put((self._tickets, message))

    def deliver(self, ticket: int, reply: Reply) -> None:
        """A reply arrives from the seat."""
        with self._lock:
            if self.failure is not None:
                return
            future, expected = self._open.pop(ticket, (None, None))
        if future is None or expected is None:
            self.break_off(Misbehaved("an answer to a question that was not asked, or was answered before"))
        elif not future.set_running_or_notify_cancel():
            pass  # not wanted any more
        elif isinstance(reply, Refusal):
            future.set_exception(Refused(reply.message))
        elif complaint := _complaint(reply, expected):
            future.set_exception(Misbehaved(complaint))
            self.break_off(Misbehaved(complaint))
        else:
            future.set_result(reply)

    def break_off(self, failure: LinkError) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            left, self._open = list(self._open.values()), {}
        self._inbox.put(None)
        for future, _ in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)

    def close(self) -> None:
        self.break_off(LinkClosed("the link was closed"))


class InProcessSeat:
    """The worker's end."""

    def __init__(
        self, inbox: SimpleQueue[tuple[int, Message] | None], link: InProcessLink, transcript: Transcript | None
    ) -> None:
        self._inbox = inbox
        self._link = link
        self._transcript = transcript

    def read(self) -> tuple[int, Message] | None:
        found = self._inbox.get()
        if found is not None and self._transcript is not None:
            self._transcript.received(found[1])
        return found

    def write(self, ticket: int, reply: Reply) -> None:
        if isinstance(reply, Answer):
            reply = replace(reply, tensors={kind: tensor.clone() for kind, tensor in reply.tensors.items()})
        if self._transcript is not None:
            self._transcript.sent(reply)
        self._link.deliver(ticket, reply)

    def close(self) -> None:
        self._link.break_off(LinkClosed("the worker stopped"))


def _complaint(reply: object, expected: Expected) -> str:
    """What is wrong with the form of an answer; the contents are the fleet's to judge."""
    if not isinstance(reply, Answer) or not isinstance(reply.tensors, Mapping):
        return "something else than an answer"
    if reply.tensors.keys() != expected.shapes.keys():
        return "an answer to another question than the one asked"
    if not isinstance(reply.seconds, float) or not 0 <= reply.seconds < math.inf:
        return "a time that is no number of seconds"
    for kind, shape in expected.shapes.items():
        tensor = reply.tensors[kind]
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or not tensor.is_cpu:
            return f"{kind.value}: something else than a plain tensor"
        if tuple(tensor.shape) != shape or tensor.dtype != expected.dtype:
            return (
                f"{kind.value}: an answer of shape {tuple(tensor.shape)} and {tensor.dtype}; "
                f"needs {shape} and {expected.dtype}"
            )
    return ""


def _copied(message: Weights | Task) -> Weights | Task:
    tensor = message.tensor
    if not isinstance(message, Weights) and message.seed is not None:
        return replace(message, tensor=shadow(tensor.dtype, tuple(tensor.shape)))
    return replace(message, tensor=tensor.clone(memory_format=torch.contiguous_format))
