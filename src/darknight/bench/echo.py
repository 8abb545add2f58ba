"""A task whose answer is its own share, to time the way there and back through a real worker."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from dataclasses import dataclass

import torch

from darknight.ops import Linear
from darknight.types import Expected, Forget, ForwardTask, Pass, Weights
from darknight.wire import Link, LinkClosed, Misbehaved

_LAYER = "(bench)"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Trip:
    """One time there and back. seconds: without those that the worker says it computed, which are `computing`."""

    seconds: float
    computing: float


class Echo:
    """A linear layer with the single weight 1: the answer is as large as the share, and the same.

    The numbers that are sent are no secret: 0, 1, 2 and so on.
    """

    def __init__(self, link: Link, nbytes: int, *, patience: float = 60.0) -> None:
        count = max(1, nbytes // torch.float32.itemsize)
        self._link = link
        self._patience = patience
        self._share = torch.arange(count, dtype=torch.float32).remainder_(1 << 20).unsqueeze_(1)
        self._expected = Expected({Pass.FORWARD: (count, 1)}, torch.float32, None)
        self._calls = 0
        link.post(Weights(layer=_LAYER, version=_VERSION, op=Linear().spec(), prime=None, tensor=torch.ones(1, 1)))

    def run(self) -> Trip:
        """Once there and back. Raises LinkError, also when another tensor comes back than went there."""
        self._calls += 1
        task = ForwardTask(
            layer=_LAYER, call=self._calls, version=_VERSION, tensor=self._share, compute=True, keep=False
        )
        begun = time.perf_counter()
        try:
            answer = self._link.ask(task, self._expected).result(self._patience)
        except (TimeoutError, CancelledError):
            raise LinkClosed(f"no answer in {self._patience:.0f} s") from None
        seconds = time.perf_counter() - begun
        if not torch.equal(answer.tensors[Pass.FORWARD], self._share):
            raise Misbehaved("another tensor came back than went there")
        # A worker that says it computed longer than everything took cannot make its link look free.
        computing = min(answer.seconds, seconds)
        return Trip(seconds=seconds - computing, computing=computing)

    def best(self, times: int) -> Trip:
        """The shortest of several."""
        return min((self.run() for _ in range(times)), key=lambda trip: trip.seconds)

    def close(self) -> None:
        """The worker forgets the layer."""
        self._link.post(Forget(weights=((_LAYER, _VERSION),)))
