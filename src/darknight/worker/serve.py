"""The worker's loop: read, compute, write, until the enclave closes the link."""

from __future__ import annotations

import logging

from darknight.errors import DarKnightError
from darknight.types import Answer, Refusal
from darknight.wire import Seat
from darknight.worker.executor import Executor

_log = logging.getLogger("darknight.worker")


def serve(seat: Seat, executor: Executor) -> None:
    """Serves one enclave until it is done. What cannot be computed is refused in words; the loop goes on."""
    try:
        while (found := seat.read()) is not None:
            ticket, message = found
            reply: Answer | Refusal | None
            try:
                reply = executor.handle(message)
            except (DarKnightError, RuntimeError, ValueError, MemoryError) as error:
                _log.warning("refused a %s: %s", type(message).__name__, error)
                reply = Refusal(message=f"{type(error).__name__}: {error}")
            if reply is not None:  # also a refusal of weights: the task that needs them gets another one
                seat.write(ticket, reply)
    finally:
        seat.close()
