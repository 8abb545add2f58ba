"""The two ends of a transport."""

from __future__ import annotations

from typing import Protocol

from darknight.types import Message, Reply


class LinkClosed(Exception):  # noqa: N818 - an event of the transport, turned into an error by the fleet
    """The other end is gone."""


class LinkTimeout(Exception):  # noqa: N818
    """Nothing arrived in time."""


class Link(Protocol):
    """The enclave's end. Messages arrive in the order in which they were sent."""

    def send(self, message: Message) -> int:
        """Sends, and returns a ticket for the reply. Raises LinkClosed."""

    def receive(self, ticket: int, timeout: float) -> Reply:
        """The reply to `ticket`; replies to older tickets are dropped. Raises LinkClosed or LinkTimeout."""

    def close(self) -> None: ...


class Seat(Protocol):
    """The worker's end."""

    def read(self) -> tuple[int, Message] | None:
        """The next message and its ticket; None when the enclave has closed the link."""

    def write(self, ticket: int, reply: Reply) -> None: ...

    def close(self) -> None: ...
