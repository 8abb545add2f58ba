"""One worker's shares on all devices of its operator's Ray cluster.

A share is (group, *feature). Its groups are cut into slices, one for each actor; an actor holds one device. Outputs are
gathered in order; weight gradients are summed in the cluster, so that one gradient comes back however many actors there
are. Weights are put into the object store once, and every node fetches them from there.

The slices and the order of the sums depend on the number of actors asked for and on nothing else, so a result does not
tell who computed it: a slice whose actor died is computed again by another one, and the bits are the same. In the field
they are also those of one device alone.

Assumes: the cluster belongs to the operator of this worker. Ray runs what its members send each other, so whoever is in
the cluster has the worker. That is nothing to the enclave, which never joins one and trusts no worker.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from darknight.errors import OpError, UsageError
from darknight.ops import BilinearOp
from darknight.types import Weights
from darknight.worker.ray_actors import Array, Crew
from darknight.worker.ray_processes import end_processes_of, no_longer_than

_STARTS = 3  # of a Ray of our own; it allows 30 s for each
_FAREWELL = 10.0  # seconds for a Ray of our own to end; then its processes are killed
_ATTEMPTS = 4  # at a slice or a sum whose actors die under it
_log = logging.getLogger("darknight.worker")


class RayEngine:
    """Actors of a Ray cluster, one for each GPU, or for each CPU slot where the cluster has no GPU.

    address: HOST:PORT of a cluster that this machine is a node of, or "auto" for the one that runs on this machine;
        None starts a Ray of this worker's own, on loopback, which ends with the worker.
    actors: how many; None takes one for each device.
    object_store: bytes for the object store of a Ray that is started here; None leaves it to Ray.
    patience: seconds without any result after which the actors that are still busy are given up and replaced.

    Make it in the main thread: a Ray that is started here ends with the thread that started it.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        actors: int | None = None,
        object_store: int | None = None,
        patience: float = 120.0,
    ) -> None:
        if address is None:
            _prepare_own_ray()
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call that comes after `close` must not start another Ray
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # else it prints tracebacks of what nobody waits for any more
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise UsageError(
                "the Ray engine needs Ray, which is not installed here: pip install 'ray>=2.50', or use --engine local."
            ) from None
        folder = self._folder = tempfile.mkdtemp(prefix="darknight-ray-") if address is None else None
        owned = not self._ray.is_initialized()
        self._leave = weakref.finalize(self, _leave, self._ray, owned, folder)  # also at the end of the program
        if owned:
            self._join(address, folder, object_store)
        self._patience = patience
        self._weights: weakref.WeakKeyDictionary[Weights, Any] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        try:
            self._crew = Crew(self._ray, actors, patience)
        except BaseException:
            self._leave()
            raise

    @property
    def actors(self) -> int:
        """How many actors were asked for: the number of slices a share is cut into, if it has as many groups."""
        return self._crew.size

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def forward(self, weights: Weights, op: BilinearOp, x: Tensor) -> Tensor:
        op.output_shape(tuple(x.shape), tuple(weights.tensor.shape))
        with self._in_words():
            w = self._put(weights)
            return self._gathered("forward", [(op, part, w, weights.prime) for part in self._slices(x)])

    def grad_input(self, weights: Weights, op: BilinearOp, delta: Tensor, x_shape: tuple[int, ...]) -> Tensor:
        op.expect(delta, x_shape, tuple(weights.tensor.shape))  # before it is cut: a slice might fit
        with self._in_words():
            w = self._put(weights)
            parts = self._slices(delta)
            tasks = [(op, part, w, (len(part), *x_shape[1:]), weights.prime) for part in parts]
            return self._gathered("grad_input", tasks)

    def grad_weight(self, weights: Weights, op: BilinearOp, x: Tensor, delta: Tensor) -> Tensor:
        w_shape = tuple(weights.tensor.shape)
        op.expect(delta, tuple(x.shape), w_shape)
        parts = zip(self._slices(x), self._slices(delta), strict=True)
        tasks = [(op, x_part, delta_part, w_shape, weights.prime) for x_part, delta_part in parts]

        def summed() -> Array:
            partials = self._each("grad_weight", tasks)
            while len(partials) > 1:  # neighbours first, whoever finishes first: the order of a sum is part of its bits
                pairs = list(zip(partials[::2], partials[1::2], strict=False))
                odd = partials[2 * len(pairs) :]
                partials = self._each("add", [(*pair, weights.prime) for pair in pairs]) + odd
            found: Array = self._ray.get(partials[0])
            return found

        with self._in_words():
            found = np.array(self._again(summed))  # a copy: Ray's memory is read-only
        return torch.from_numpy(found).to(x.dtype)

    def forget(self, weights: Weights) -> None:
        with self._lock:
            self._weights.pop(weights, None)  # nobody else has the reference: Ray frees the object on all nodes

    def close(self) -> None:
        with self._lock:
            self._weights.clear()
        with no_longer_than(_FAREWELL, self._folder):
            self._crew.close()
        self._leave()

    # --- scatter and gather -----------------------------------------------------------------------------------------
    def _put(self, weights: Weights) -> Any:
        with self._lock:
            if weights not in self._weights:
                self._weights[weights] = self._ray.put(weights.tensor.contiguous().numpy())
            return self._weights[weights]

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """What Ray raises here, such as a store that is full, becomes a refusal: it must not end the worker's loop."""
        if not self._leave.alive:
            raise OpError("ray: this worker has left its cluster, because it stops.")
        try:
            yield
        except self._ray.exceptions.RayError as error:
            raise OpError(f"ray: {type(error).__name__}: {_first_line(error)} See `ray status`.") from None

    def _slices(self, tensor: Tensor) -> list[Array]:
        count = max(1, min(self.actors, len(tensor)))
        return [part.contiguous().numpy() for part in torch.tensor_split(tensor, count)]

    def _gathered(self, method: str, tasks: Sequence[tuple[Any, ...]]) -> Tensor:
        arrays = self._again(lambda: self._ray.get(self._each(method, tasks)))
        return torch.from_numpy(np.concatenate(arrays))

    def _again(self, compute: Callable[[], Any]) -> Any:
        """What `compute` gives; from the start where results were lost with the node that held them."""
        for _ in range(_ATTEMPTS):
            try:
                return compute()
            except self._ray.exceptions.ObjectLostError:
                _log.warning("ray: a node was lost with the results on it; they are computed again")
        raise OpError("ray: the cluster keeps losing the results that are on its nodes. See `ray status`.")

    def _each(self, method: str, tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """A reference to the result of each task, in order; the results stay in the cluster."""
        done: dict[int, Any] = {}
        for _ in range(_ATTEMPTS):
            actors = self._crew.ready()
            running: dict[Any, tuple[int, Any, Any]] = {}
            for turn, number in enumerate(n for n in range(len(tasks)) if n not in done):
                actor = actors[turn % len(actors)]
                value, token = getattr(actor, method).remote(*tasks[number])
                running[token] = (number, value, actor)
            while running:
                finished, _ = self._ray.wait(list(running), timeout=self._patience)
                for token in finished:
                    number, value, actor = running.pop(token)
                    if self._succeeded(token, actor):
                        done[number] = value
                if not finished:
                    for _, _, actor in running.values():
                        self._crew.lost(actor, f"gave no result for {self._patience:g} s")
                    break
            if len(done) == len(tasks):
                return [done[number] for number in range(len(tasks))]
        raise OpError(
            f"ray: {_ATTEMPTS} times in a row an actor died while it computed. See `ray status` and its logs."
        )

    def _succeeded(self, token: Any, actor: Any) -> bool:
        """Whether a task ended well; False for one that must be done again, by another actor."""
        exceptions = self._ray.exceptions
        try:
            self._ray.get(token)
        except exceptions.RayTaskError as error:  # the task itself failed, and would fail again
            cause = error.cause
            if isinstance(cause, OpError):
                raise OpError(str(cause)) from None
            raise OpError(f"ray: an actor failed with {type(cause).__name__}. {_first_line(cause)}") from None
        except exceptions.ObjectLostError:
            raise  # its operands are gone, not the actor
        except exceptions.RayError as error:
            self._crew.lost(actor, type(error).__name__)
            return False
        return True

    # --- the cluster ------------------------------------------------------------------------------------------------
    def _join(self, address: str | None, folder: str | None, object_store: int | None) -> None:
        settings: dict[str, Any] = {
            "log_to_driver": False,  # what actors print is not the worker's to print
            "configure_logging": False,
            "logging_level": logging.WARNING,
        }
        if address is None:
            settings |= {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            settings |= {"_temp_dir": folder, "object_store_memory": object_store}
        elif "://" in address:
            raise UsageError(
                f"Ray address {address[:80]}: Ray Client would copy each share twice. Run the worker on a node of the "
                "cluster, and give HOST:PORT of its head, or auto."
            )
        else:
            settings["address"] = address
        try:
            if address is not None and address != "auto":
                _knock(address)
            with _own_signals():
                self._begin(settings, folder)
        except Exception as error:  # Ray raises whatever its parts raise
            self._leave()
            where = "on this machine" if address is None else f"at {address[:80]}"
            remedy = (
                "Start the worker again when the machine is less busy, or start a cluster with `ray start --head` and "
                "give --ray-address auto."
                if address is None
                else "Start one with `ray start --head`, or leave out --ray-address to let the worker start its own."
            )
            raise UsageError(f"no Ray cluster could be had {where}: {_first_line(error)} {remedy}") from None

    def _begin(self, settings: dict[str, Any], folder: str | None) -> None:
        """A Ray of our own gets another chance: on a busy machine the first start can take longer than Ray allows."""
        for _ in range(_STARTS - 1):
            try:
                self._ray.init(**settings)
                return
            except Exception as error:
                if folder is None:
                    raise
                _log.warning("Ray did not start", extra={"fields": {"reason": _first_line(error)}})
                self._ray.shutdown()
                end_processes_of(folder)
        self._ray.init(**settings)


def _leave(ray: Any, owned: bool, folder: str | None) -> None:
    if owned and ray.is_initialized():
        with _own_signals(), no_longer_than(_FAREWELL, folder):
            ray.shutdown()
    if folder is not None:
        end_processes_of(folder)  # Ray forgets its agents when the process dies that started them
        shutil.rmtree(folder, ignore_errors=True)


def _knock(address: str) -> None:
    """Raises OSError or ValueError if nothing listens there; Ray itself would take minutes to find out."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{lines[0][:300].rstrip('.')}." if lines else "It says no more."


def _prepare_own_ray() -> None:
    """Settings of a Ray of our own, which it reads from the environment as it is imported.

    Guarantees: it listens on loopback alone, and only who has the token of this process takes part in it (contract
    test: tests/worker/test_ray.py::test_ray_of_our_own_listens_on_loopback_only).
    """
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "AUTOSCALER_METRIC_PORT": "0",  # any: several workers of one machine have a Ray each
        # Ray takes "127.0.0.1" for "find a better address"; this makes it keep to loopback, as on other systems.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_worker_niceness": "0",  # its actors are the worker, not something that runs beside it
    }
    if sys.modules.get("ray") is None:
        os.environ.update(settings, RAY_AUTH_TOKEN=secrets.token_hex(32))
    elif any(os.environ.get(name) != value for name, value in settings.items()):
        raise UsageError(
            "Ray was imported before the engine that starts it, so it would listen on every address of this machine. "
            "Make the engine first, or give the address of a cluster."
        )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself as it starts; the worker's own handlers are put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
