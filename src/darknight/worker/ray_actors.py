"""The Ray engine's hands: one actor for each device, and the crew that replaces those that are lost."""

from __future__ import annotations

import logging
import threading
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from darknight.errors import OpError, UsageError
from darknight.ops import BilinearOp
from darknight.worker.choice import Choice

Array = npt.NDArray[Any]

_log = logging.getLogger("darknight.worker")


class Crew:
    """The actors: those that work, and those that are starting. A lost one is replaced by a new one."""

    def __init__(self, ray: Any, size: int | None, patience: float) -> None:
        self._ray = ray
        resources = ray.cluster_resources()
        self._gpu = resources.get("GPU", 0) >= 1
        slots = int(resources.get("GPU" if self._gpu else "CPU", 0))
        kind = "GPUs" if self._gpu else "CPU slots"
        if slots < 1 or (size is not None and not 1 <= size <= slots):
            asked = "one actor for each device" if size is None else f"{size} actors"
            raise UsageError(f"{asked}; the Ray cluster has {slots} {kind}. An actor takes one: ask for at most that.")
        self.size = size or slots
        self._patience = patience
        self._lock = threading.Lock()
        self._working: list[Any] = []
        self._starting: dict[Any, Any] = {}  # the sign that an actor is up -> the actor
        # Ray finds the class by its name on every node: it must be installed there.
        needs = {"num_gpus": 1, "num_cpus": 0} if self._gpu else {"num_cpus": 1}
        self._recipe = ray.remote(Actor).options(scheduling_strategy="SPREAD", **needs)
        self._why = "none has started yet"
        with self._lock:
            self._fill()
            ray.wait(list(self._starting), num_returns=self.size, timeout=patience)
            self._muster()
        if len(self._working) < self.size:
            _log.warning("ray: %d of %d actors came up; %s", len(self._working), self.size, self._why)
        if not self._working:
            self.close()
            raise UsageError(
                f"no actor of the Ray cluster came up: {self._why}. Its nodes need the package darknight-worker."
            )

    def ready(self) -> list[Any]:
        """The actors that work, at least one; waits for one if need be. Raises OpError when there is none to be had."""
        with self._lock:
            self._fill()
            self._muster()
            if not self._working:
                self._ray.wait(list(self._starting), timeout=self._patience)
                self._muster()
            if not self._working:
                raise OpError(
                    f"ray: no actor can be had: {self._why}. Look at `ray status`, and give the cluster its nodes back."
                )
            return list(self._working)

    def lost(self, actor: Any, why: str) -> None:
        with self._lock:
            if actor not in self._working:
                return
            _log.warning("ray: an actor is replaced: %s", why)
            self._why = f"the last one: {why}"
            self._working.remove(actor)
            self._ray.kill(actor)  # it may be alive and hang, with a device in its hands
            self._fill()

    def close(self) -> None:
        with self._lock:
            for actor in [*self._working, *self._starting.values()] if self._ray.is_initialized() else []:
                self._ray.kill(actor)
            self._working, self._starting = [], {}

    def _fill(self) -> None:
        while len(self._working) + len(self._starting) < self.size:
            actor = self._recipe.remote(self._gpu)
            self._starting[actor.ready.remote()] = actor

    def _muster(self) -> None:
        """Takes in the actors that have come up by now, and drops those that failed to."""
        if not self._starting:
            return
        up, _ = self._ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for sign in up:
            actor = self._starting.pop(sign)
            try:
                self._ray.get(sign)
            except self._ray.exceptions.RayError as error:
                self._why = f"the last one failed to start: {type(error).__name__}"
                _log.warning("ray: an actor failed to start: %s", type(error).__name__)
            else:
                self._working.append(actor)


class Actor:
    """One device of the cluster. Every task gives its result and a token: the token tells how it went, and is small."""

    def __init__(self, gpu: bool) -> None:
        self._device = torch.device("cuda" if gpu else "cpu")
        self._choice = Choice(self._device)
        # Ray hands over memory that nobody may write; nothing here does.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def ready(self) -> None:
        return None

    def forward(self, op: BilinearOp, x: Array, w: Array, prime: int | None) -> tuple[Array, None]:
        return self._back(self._choice.forward(op, self._on(x), self._on(w), prime)), None

    def grad_input(
        self, op: BilinearOp, delta: Array, w: Array, x_shape: tuple[int, ...], prime: int | None
    ) -> tuple[Array, None]:
        return self._back(self._choice.grad_input(op, self._on(delta), self._on(w), x_shape, prime)), None

    def grad_weight(
        self, op: BilinearOp, x: Array, delta: Array, w_shape: tuple[int, ...], prime: int | None
    ) -> tuple[Array, None]:
        """A slice's part of the gradient; floats stay float64 until all parts are summed: docs/adr/0003."""
        left, right = self._on(x), self._on(delta)
        if prime is None:
            left, right = left.to(torch.float64), right.to(torch.float64)
        return self._back(self._choice.grad_weight(op, left, right, w_shape, prime)), None

    def add(self, left: Array, right: Array, prime: int | None) -> tuple[Array, None]:
        if prime is None:
            return left + right, None
        return ((left.astype(np.int64) + right) % prime).astype(left.dtype), None

    def _on(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _back(self, tensor: Tensor) -> Array:
        found: Array = tensor.cpu().numpy()
        return found


for _name in ("forward", "grad_input", "grad_weight", "add"):
    getattr(Actor, _name).__ray_num_returns__ = 2  # what ray.method(num_returns=2) does, without importing ray
