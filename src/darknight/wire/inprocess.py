"""Both ends in one process, with a queue for each direction.

Every tensor is copied as it is sent, in both directions, as a real transport would: a share is a part of a tensor that
holds all shares, and the enclave's own weights check the answers. Whoever receives gets memory of its own.
"""

from __future__ import annotations

import time
from dataclasses import replace
from queue import Empty, SimpleQueue

import torch

from darknight.types import Answer, Forget, Message, Reply, Task, Weights
from darknight.wire.link import LinkClosed, LinkTimeout
from darknight.wire.transcript import Transcript


def in_process(transcript: Transcript | None = None) -> tuple[InProcessLink, InProcessSeat]:
    """The two ends of a new link; the seat writes down in `transcript` what it reads and writes."""
    inbox: SimpleQueue[tuple[int, Message] | None] = SimpleQueue()
    outbox: SimpleQueue[tuple[int, Reply] | None] = SimpleQueue()
    return InProcessLink(inbox, outbox), InProcessSeat(inbox, outbox, transcript)


class InProcessLink:
    """The enclave's end."""

    def __init__(
        self, inbox: SimpleQueue[tuple[int, Message] | None], outbox: SimpleQueue[tuple[int, Reply] | None]
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._tickets = 0
        self._closed = False

    def send(self, message: Message) -> int:
        if self._closed:
            raise LinkClosed
        self._tickets += 1
        self._inbox.put((self._tickets, message if isinstance(message, Forget) else _copied(message)))
        return self._tickets

    def receive(self, ticket: int, timeout: float) -> Reply:
        deadline = time.monotonic() + timeout
        while not self._closed:
            left = deadline - time.monotonic()
            try:
                found = self._outbox.get(timeout=max(0.0, left))
            except Empty:
                raise LinkTimeout from None
            if left < 0:  # also when other answers keep coming
                raise LinkTimeout
            if found is None:
                self._closed = True
            elif found[0] == ticket:
                return found[1]
        raise LinkClosed

    def close(self) -> None:
        self._closed = True
        self._inbox.put(None)


class InProcessSeat:
    """The worker's end."""

    def __init__(
        self,
        inbox: SimpleQueue[tuple[int, Message] | None],
        outbox: SimpleQueue[tuple[int, Reply] | None],
        transcript: Transcript | None,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
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
        self._outbox.put((ticket, reply))

    def close(self) -> None:
        self._outbox.put(None)


def _copied(message: Weights | Task) -> Weights | Task:
    return replace(message, tensor=message.tensor.clone(memory_format=torch.contiguous_format))
