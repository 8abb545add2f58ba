"""The runtime: every protected layer of every model calls it, one call at a time."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from darknight.accounting import ONE_OPERATOR, Accountant, Ledger, Spent, check_budget
from darknight.coding import Field, Finish, Scheme
from darknight.errors import EncodingError, FleetError, OpError, PrivacyWarning, SchemeError, UsageError, other_format
from darknight.fleet import Fleet
from darknight.ops import BilinearOp
from darknight.randomness import Randomness
from darknight.runtime.alone import FieldAlone, RealAlone
from darknight.runtime.autograd import in_backward
from darknight.runtime.bounds import Bounds
from darknight.runtime.exchange import Exchange
from darknight.runtime.field import FieldCalls
from darknight.runtime.layer import Layer, LayerState, Saved, SentWeights, check_state
from darknight.runtime.masked_field import MaskedField
from darknight.runtime.masked_real import MaskedReal
from darknight.runtime.phases import phase
from darknight.runtime.real import RealCalls
from darknight.types import Pass

T = TypeVar("T")

_NOTHING = nullcontext()
_STATE = 1  # the format of a runtime's state
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Runtime:
    """Does the bilinear work of protected layers through a fleet, or alone: `Runtime(scheme, None)`.

    seed: of the rounding of gradients. The same seed gives the same weights, whatever the masks; it needs no secrecy.
    strict_bounds: an input beyond the bound that protect_ declared for it raises, and does not raise the bound (Real).
    leakage_budget: nats that any `scheme.colluders` workers may learn about one example that is in every batch. What
    would exceed it raises PrivacyBudgetError before it is sent: from the second step on when the model is called,
    because the next step is taken to cost what the costliest did; else in a forward pass, whose backward pass then is
    not needed. Parameters and optimizer are as they were, and at the beginning of a step so are buffers and gradients.

    Guarantees: any `scheme.colluders` workers learn from what they receive nothing about inputs and gradients (Field),
        or at most what `ledger` says (Real), and never more than `leakage_budget`; a result that was not verified is
        never returned. With a field, results are bit for bit those of `Runtime(scheme, None)`. Contract tests:
        tests/runtime/test_privacy.py, tests/runtime/test_composition.py, tests/runtime/test_budget.py,
        tests/runtime/test_integrity.py, tests/runtime/test_bit_identity.py.
    Assumes: what SECURITY.md says: separate operators, links of their own, an enclave that keeps its memory. For
        nats, what accounting.accountant assumes.
    Leaks: weights, shapes, the number and timing of calls, retries after overflow.
    """

    def __init__(
        self,
        scheme: Scheme,
        fleet: Fleet | None,
        *,
        seed: int = 0,
        strict_bounds: bool = False,
        leakage_budget: float | None = None,
    ) -> None:
        if not isinstance(scheme, Scheme):
            raise SchemeError(
                f"a {type(scheme).__name__} where a scheme belongs. Use dk.Scheme(inputs=4, colluders=1)."
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise UsageError(f"seed={seed!r}; needs a whole number from 0 to 2^63 - 1.")
        if fleet is not None:
            _check_fleet(scheme, fleet)
        one_operator = fleet is not None and fleet.insecure_one_operator
        check_budget(leakage_budget, scheme, one_operator=one_operator)
        self.scheme = scheme
        self.fleet = fleet
        self.seed = seed
        exact = isinstance(scheme.arithmetic, Field)
        self.ledger = Ledger(
            exact=exact,
            not_covered=scheme.caveats,
            sends=fleet is not None,
            one_operator=one_operator,
            colluders=scheme.colluders,
            seats=scheme.seats,
            budget=leakage_budget,
        )
        self._layers: dict[str, Layer] = {}
        self._loaded: dict[str, LayerState] = {}  # of layers that were not called yet
        self._run = f"{os.getpid()}.{time.time_ns()}"
        self._goes_on: object = None  # the earlier run whose leakage is counted already
        self._versions = 0
        self._lock = threading.RLock()
        self._closed = False
        self._inside = False
        self._warned = False
        self._exchange = Exchange(scheme, fleet, self.ledger) if fleet is not None else None
        self._calls = self._make_calls(strict_bounds)
        if fleet is not None:
            fleet.attach(self)

    def _make_calls(self, strict_bounds: bool) -> FieldCalls | RealCalls:
        scheme, arithmetic, exchange, ledger = self.scheme, self.scheme.arithmetic, self._exchange, self.ledger
        if exchange is None:
            if isinstance(arithmetic, Field):
                return FieldCalls(scheme, arithmetic, FieldAlone(arithmetic.prime), self.seed, ledger)
            return RealCalls(arithmetic, RealAlone())
        randomness = Randomness.from_operating_system()
        if isinstance(arithmetic, Field):
            masked = MaskedField(scheme, arithmetic, exchange, randomness, ledger)
            return FieldCalls(scheme, arithmetic, masked, self.seed, ledger)
        bounds = Bounds(strict_bounds, ledger)
        return RealCalls(arithmetic, MaskedReal(scheme, arithmetic, exchange, randomness, bounds, ledger))

    @property
    def caution(self) -> str:
        """What must be said wherever this runtime's protection is reported; empty if nothing must."""
        return ONE_OPERATOR if self.fleet is not None and self.fleet.insecure_one_operator else ""

    # --- layers -----------------------------------------------------------------------------------------------------
    def layer(
        self,
        label: str,
        bound: float | None = None,
        *,
        home: bool = False,
        free: bool = False,
        moved: Callable[[bool], None] | None = None,
    ) -> Layer:
        """A new layer, called `label`. A second one of that name gets a number on the wire.

        home: the caller computes it, and never calls `forward` with it; `free` and `moved` as in Layer.
        """
        with self._lock:
            name, number = label, 1
            while name in self._layers:
                number += 1
                name = f"{label}#{number}"
            layer = Layer(name, label or "(model)", bound is not None, bound, home=home, free=free, moved=moved)
            if name in self._loaded:
                layer.check_place(self._loaded[name])
                layer.restore(self._loaded.pop(name))
            self._layers[name] = layer
            return layer

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the model: the seed and, of layers, index of the rounding, bounds and place.

        And what leaked so far; `run` tells apart a state of this runtime, which knows it, and one of an earlier run.
        """
        layers = {**self._loaded, **{name: layer.state() for name, layer in self._layers.items()}}
        return {"format": _STATE, "seed": self.seed, "layers": layers, "run": self._run, "leaked": self.ledger.leaked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Protect the model first; products that no module stands for follow."""
        layers = state.get("layers") if isinstance(state, Mapping) else None
        if not isinstance(layers, Mapping):
            raise UsageError("this is no state of a runtime. Load one that state_dict() gave.")
        if (found := state.get("format", _STATE)) != _STATE:
            raise UsageError(f"the state of a runtime is of {other_format(found, reads=_STATE)}.")
        if state.get("seed") != self.seed:
            raise UsageError(
                f"the state is of seed {state.get('seed')!r}, this runtime of {self.seed}. Use the same seed."
            )
        missing = sorted(self._layers.keys() - layers.keys())
        if missing:
            raise UsageError(
                f"the state is of other layers: it has no {missing[0]!r}. Protect the same model, then load it."
            )
        for name, entry in layers.items():
            check_state(name, entry)
        for name, layer in self._layers.items():
            layer.check_place(layers[name])
        leaked = Accountant.of(state.get("leaked", {}))
        if state.get("run") not in (self._run, self._goes_on):
            self._goes_on = state.get("run")
            self.ledger.leaked_before(leaked)
        for name, layer in self._layers.items():
            layer.restore(layers[name])
        self._loaded = {name: dict(entry) for name, entry in layers.items() if name not in self._layers}

    def release(self, layers: Iterable[Layer]) -> None:
        """Layers that are not protected any more: their names are free again, and workers forget their weights."""
        with self._lock:
            for layer in layers:
                if self._layers.get(layer.name) is layer:
                    del self._layers[layer.name]
                layer.weights = layer.earlier = None

    # --- one layer call ---------------------------------------------------------------------------------------------
    def model_called(self) -> None:
        """A protected model begins a forward pass. Raises PrivacyBudgetError if that begins a step that may not be."""
        if torch.is_grad_enabled() and not in_backward():
            with self._lock:
                self.ledger.budget.model_called()

    def forward(
        self,
        layer: Layer,
        op: BilinearOp,
        x: Tensor,
        w: Tensor,
        *,
        dtype: torch.dtype,
        keep: bool,
        finish: Finish | None = None,
    ) -> tuple[Tensor, Saved]:
        """<w, x> in `dtype`, finished, and what its backward pass needs. `keep` says whether there can be one."""

        def call() -> tuple[Tensor, Saved]:
            self._check_operands(op, x, w)
            if keep and not self.scheme.training:
                raise SchemeError(
                    "this scheme is for inference alone. Use torch.no_grad(), or a scheme for training "
                    "(without for_inference())."
                )
            if keep and x.shape[0] == 1 and self.fleet is not None:
                self._warn_of_one()
            with phase("weights"):
                weights = self._weights(layer, op, w)
            return self._calls.forward(layer, op, x, weights, dtype, keep, finish)

        return self._alone(layer, call)

    def backward(
        self,
        layer: Layer,
        saved: Saved,
        x: Tensor,
        delta: Tensor,
        dtypes: dict[Pass, torch.dtype],
        largest: float | None = None,
    ) -> dict[Pass, Tensor]:
        """The passes of `dtypes`, each in its dtype: the gradients of x and w.

        largest: max |delta|, if somebody found it already.
        """

        def call() -> dict[Pass, Tensor]:
            passes = tuple([kind for kind in (Pass.GRAD_INPUT, Pass.GRAD_WEIGHT) if kind in dtypes])
            results = self._calls.backward(layer, saved, x, delta, passes, dtypes, largest)
            layer.gradients += 1
            return results

        return self._alone(layer, call)

    def tidy(self) -> None:
        """Between steps: workers forget the shares of calls that are over. A fleet calls this; nobody else need to."""
        if self._exchange is not None and self._lock.acquire(blocking=False):
            try:
                if not self._closed and not self._inside:
                    self._exchange.forget()
            finally:
                self._lock.release()

    # --- closing ----------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Ends the runtime. Workers forget what it sent; protected models raise from now on, until unprotected."""
        with self._lock:  # after a call of another thread
            if not self._closed:
                self._closed = True
                if self.fleet is not None:
                    self.fleet.detach(self)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def __repr__(self) -> str:
        hands = "alone" if self.fleet is None else f"{self.scheme.workers} workers"
        return f"<Runtime: {hands}, {len(self._layers)} layers{', closed' if self._closed else ''}>"

    def __deepcopy__(self, memo: dict[int, object]) -> Runtime:
        return self  # a copied model is protected by the same runtime

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError(
            "a runtime cannot be pickled, and so neither can a protected model. Save model.state_dict(), or call "
            "dk.unprotect_(model) first."
        )

    # --- helpers ----------------------------------------------------------------------------------------------------
    def _alone(self, layer: Layer, call: Callable[[], T]) -> T:
        """One layer call: alone in the runtime, without autograd and autocast, timed."""
        with self._lock, _as_it_is(), phase("rest", layer.label):
            if self._closed:
                raise FleetError(
                    f"layer {layer.label}: its runtime is closed. Use the model inside the runtime's context, or call "
                    "dk.unprotect_(model)."
                )
            if self._inside:  # it would take the answers that the outer call waits for
                raise FleetError("a layer call inside a layer call. Do not run the model in a signal handler.")
            begun, (waited, worked) = time.perf_counter(), self._worker_times()
            try:
                self._inside = True
                return call()
            except (OpError, EncodingError) as error:
                raise type(error)(f"layer {layer.label}: {error}") from None
            finally:
                self._inside = False
                waiting, working = self._worker_times()
                total = time.perf_counter() - begun
                self.ledger.record(Spent(total=total, waiting=waiting - waited, workers=working - worked))

    def _worker_times(self) -> tuple[float, float]:
        return self._exchange.seconds if self._exchange else (0.0, 0.0)

    def _weights(self, layer: Layer, op: BilinearOp, w: Tensor) -> SentWeights:
        """The version of the weights that workers have, or a new one if the weights changed, however they did."""
        known = layer.weights
        if known is not None and ((known.op is not op and known.op != op) or known.tensor.shape != w.shape):
            known = None  # of another form
        if known is not None and self._calls.are_still(known, w):
            return known
        try:
            new = self._calls.weights(op, w, known, keep=self.fleet is not None)
        except EncodingError as error:
            raise EncodingError(f"its weight: {error}") from None
        self._versions += 1
        layer.earlier = new.earlier
        layer.weights = SentWeights(layer.name, self._versions, op, new.tensor, new.exponent, sizes=new.sizes)
        return layer.weights

    def _check_operands(self, op: BilinearOp, x: Tensor, w: Tensor) -> None:
        for what, tensor in (("input", x), ("weight", w)):
            if tensor.device.type != "cpu":
                raise OpError(
                    f"its {what} is on {tensor.device}; the enclave computes on the CPU. Move the model there."
                )
            if tensor.dtype not in _FLOATS:
                raise OpError(f"its {what} is {tensor.dtype}; needs a floating-point tensor.")
        op.output_shape(tuple(x.shape), tuple(w.shape))

    def _warn_of_one(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "a batch of one example: workers see the weights before and after a step, and their difference is "
                "then this example's gradient. Use larger batches.",
                PrivacyWarning,
                stacklevel=2,
            )


def _as_it_is() -> AbstractContextManager[None]:
    """Without autograd and autocast: inside a function of autograd they are off, as a rule."""
    return _plain() if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") else _NOTHING


@contextmanager
def _plain() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _check_fleet(scheme: Scheme, fleet: Fleet) -> None:
    if not isinstance(fleet, Fleet):
        raise FleetError(
            f"a {type(fleet).__name__} where a fleet belongs. Use dk.local_fleet(scheme), "
            'dk.connect("fleet.toml"), or None.'
        )
    if fleet.closed:
        raise FleetError("the fleet is closed. Start another one.")
