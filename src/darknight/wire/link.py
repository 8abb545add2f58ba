"""The two ends of a transport, whatever it is made of."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from darknight.types import Answer, Expected, Forget, Message, Reply, Task, TooLarge, Weights


class LinkError(Exception):
    """What can become of a link or of a task that was asked over it; the fleet turns it into words for people."""


class LinkClosed(LinkError):  # noqa: N818 - an event, as are the next two
    """The other end is gone: it stopped, or the connection broke. The link is of no use any more."""


class Misbehaved(LinkError):  # noqa: N818
    """The worker sent what nobody asked for, or not what was asked for. The link is closed and stays so."""


class Refused(LinkError):  # noqa: N818
    """The worker says that it cannot do this task, and why. The link lives on."""


class Link(Protocol):
    """The enclave's end. Messages arrive in the order in which they were sent; answers come in any order.

    Several tasks may be under way at once. A future is resolved by a thread of the link; cancelling one means that the
    answer is not wanted any more: it is dropped when it comes, if it ever does.
    """

    def post(self, message: Weights | Forget) -> None:
        """Sends what has no answer. Raises LinkClosed or Misbehaved if the link is broken."""

    def ask(self, task: Task, expected: Expected) -> Future[Answer]:
        """Sends a task. The future ends with an answer of the expected shapes and dtype, or with a LinkError.

        The answer's tensors are memory of the enclave's own, as many bytes as `expected` says; or lent, if it says so,
        and then to be read once and released. Raises like `post`.
        """

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Memory where the worker will read the share of a task from, if whoever makes it writes it there and asks with
        this very tensor; None where shares are copied.

        The worker sees what is written at once, and can write there too: write the share and nothing else, and do not
        read it. Who drops the tensor without asking gives the memory back. Raises like `post`.
        """

    @property
    def takes_seeds(self) -> bool:
        """Whether a seed is sent in the place of its share; if not, the share is."""

    @property
    def shares_memory(self) -> bool:
        """Whether the worker reads tensors where the enclave has written them; if not, they are sealed and sent."""

    @property
    def failure(self) -> LinkError | None:
        """Why the link is broken; None while it works."""

    def close(self) -> None:
        """Ends the link. Every open future ends with LinkClosed. A second time does nothing."""


class Seat(Protocol):
    """The worker's end."""

    def read(self) -> tuple[int, Message | TooLarge] | None:
        """The next message and its ticket, or TooLarge in its place; None when the enclave has closed the link."""

    def write(self, ticket: int, reply: Reply) -> None:
        """The reply to the task that came with `ticket`."""

    def close(self) -> None: ...
