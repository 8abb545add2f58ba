"""The worker's loop: read, compute, write, until the enclave closes the link."""

from __future__ import annotations

import logging
from collections.abc import Callable

from darknight.errors import DarKnightError
from darknight.types import Answer, BackwardTask, ForwardTask, Message, Refusal, TooLarge
from darknight.wire import LinkError, Seat
from darknight.worker.executor import Executor

_log = logging.getLogger("darknight.worker")


Observer = Callable[[Message | TooLarge, Answer | Refusal | None], None]


def serve(seat: Seat, executor: Executor, observe: Observer | None = None) -> None:
    """Serves one enclave until it is done. What cannot be computed is refused in words; the loop goes on.

    `observe` hears of every message and of what became of it.
    """
    try:
        while (found := seat.read()) is not None:
            ticket, message = found
            reply = _reply(executor, message)
            if observe is not None:
                observe(message, reply)
            # What was posted has no answer: a refusal of weights is remembered for the task that needs them.
            if reply is not None and _asks(message):
                seat.write(ticket, reply)
            del found, message, reply  # while it waits for the next one it keeps nothing alive
    except LinkError as error:
        _log.info("link broken", extra={"fields": {"reason": str(error)}})
    finally:
        seat.close()


def _reply(executor: Executor, message: Message | TooLarge) -> Answer | Refusal | None:
    try:
        return executor.handle(message)
    except DarKnightError as error:
        return Refusal(message=str(error))
    except Exception as error:  # whatever an enclave sends, it ends no loop but its own task
        return Refusal(message=f"{type(error).__name__}: {error}")


def _asks(message: Message | TooLarge) -> bool:
    if isinstance(message, TooLarge):
        return message.version is None
    return isinstance(message, ForwardTask | BackwardTask)
