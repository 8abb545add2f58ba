"""Seeing every product that a protected model computes, also those that no module of its own stands for.

While a protected model's forward runs, a function mode sees each torch function that it calls. A linear map or
convolution whose weight is a parameter of the model goes to the runtime; every other product stays in the enclave and
is counted in the report. The mode being active also keeps torch.nn's transformer layers from their fused fast path,
which would compute protected layers behind our back.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from darknight.errors import OpError
from darknight.nn.behind import NOTHING, Behind, Finished, Sequence
from darknight.nn.depthwise import convolved
from darknight.nn.few_rows import multiplied
from darknight.nn.flops import FlopCounter
from darknight.nn.following import Following
from darknight.nn.function import product
from darknight.nn.one_by_one import pointwise
from darknight.nn.public import PublicParameters
from darknight.nn.report import ENCLAVE, MASKED, Report
from darknight.nn.staying import Staying
from darknight.nn.steps import Reading
from darknight.ops import BilinearOp, Conv, ConvTranspose, Linear
from darknight.ops.place import stays_by_structure
from darknight.runtime import Layer, Runtime

_AS_BEFORE = "as it was in the run whose state was loaded"


class _Running(threading.local):
    """What is active in this thread: the path of the running module, and the outermost module that is running."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.outermost: tuple[str, nn.Module] | None = None
        self.staying: str | None = None  # why the products of the running layer are computed here
        self.layer: nn.Module | None = None  # that layer
        self.watch: _Watch | None = None


class Protection:
    """One protected model: its runtime, its layers by label, its report. Copies of the model share it.

    selected: names of the parameters that may be sent. asked: labels of those that somebody asked to be sent.
    """

    def __init__(
        self,
        runtime: Runtime,
        report: Report,
        selected: Set[str],
        bounds: dict[str, float],
        asked: Set[str] = frozenset(),
    ) -> None:
        self.runtime = runtime
        self.report = report
        self._bounds = bounds
        self._asked = asked
        self._layers: dict[str, Layer] = {}
        self._reasons: dict[str, str] = {}  # by label: why a layer stays here, empty if it is sent
        self._parameters = PublicParameters(selected)
        self._costs: dict[tuple[object, ...], int] = {}
        self._free: set[object] = set()
        self._active = _Running()
        self._bindings: weakref.WeakSet[object] = weakref.WeakSet()
        self._sequence = Sequence()
        self.at_home = Staying(self._sequence)

    def __deepcopy__(self, memo: dict[int, object]) -> Protection:
        return self

    def layer(self, label: str, kind: str, why: str = "", *, free: bool = False) -> Layer:
        """The layer of that name, which is made if there is none.

        why: the reason for which it stays in the enclave. free: nobody asked for its place.
        """
        if label not in self._layers:
            self._reasons[label] = why

            def moved(home: bool) -> None:
                self._reasons[label] = (why or _AS_BEFORE) if home else ""
                self.report.move(label, kind, ENCLAVE if home else MASKED, self._reasons[label])

            bound = self._bounds.get(label)
            self._layers[label] = self.runtime.layer(label, bound, home=bool(why), free=free, moved=moved)
        return self._layers[label]

    def stays(self, label: str, kind: str, op: BilinearOp, w: Tensor) -> str:
        """Why the product of a layer is computed here; empty if it is sent. A new one is judged by its structure."""
        asked = label in self._asked or label.partition("[")[0] in self._asked
        self.layer(label, kind, "" if asked else stays_by_structure(op, tuple(w.shape)), free=not asked)
        return self._reasons[label]

    def reason(self, label: str) -> str:
        """Why a layer that is known stays here; empty if it is sent."""
        return self._reasons[label]

    def product(
        self,
        label: str,
        kind: str,
        op: BilinearOp,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        module: nn.Module | None = None,
    ) -> Tensor:
        """The product through the runtime, counted. module: the one that it is the whole forward of."""
        self.at_home.seen()
        with torch._C.DisableTorchFunction():  # shapes and dtypes are asked of torch functions too: a dozen of them
            following = NOTHING if module is None else self._sequence.behind(module)
            y, behind = product(self.runtime, self.layer(label, kind), op, x, w, bias, following)
            batch = x.shape if x.dim() >= w.dim() else (1, *x.shape)
            self.report.count(label, kind, MASKED, "", op.flops(tuple(batch), tuple(w.shape)))
        self.at_home.multiplied(y, behind)
        return y

    def bound(self, binding: object) -> None:
        """A module is protected by this, or a copy of one."""
        self._bindings.add(binding)

    def unbound(self, binding: object) -> None:
        """It is not any more. With the last one the layers are released."""
        self._bindings.discard(binding)
        if not self._bindings:
            self.runtime.release(self._layers.values())
            self._layers.clear()
            self._reasons.clear()

    # --- while a model runs -----------------------------------------------------------------------------------------
    @contextmanager
    def watching(self, path: str, module: nn.Module) -> Iterator[None]:
        """The function mode is on in this thread, from the outermost watched module inwards.

        Before that one runs, and changes a buffer, the runtime may refuse it.
        """
        active = self._active
        if active.outermost is None:
            self.runtime.model_called()
        active.paths.append(path)
        try:
            if active.outermost is None:
                active.outermost = (path, module)
                try:
                    with _Watch(self) as active.watch:
                        yield
                finally:
                    active.outermost = active.watch = None
            else:
                yield
        finally:
            active.paths.pop()

    def run(self, modules: nn.Sequential, input: Any) -> Any:
        """The modules one after the other, of which each knows what stands behind it."""
        return self._sequence.run(modules, input, self._active.watch)

    def follow(self, reading: Reading, module: nn.Module, given: tuple[Any, ...]) -> Any:
        """The steps of a module's forward, in which it is known who gets what a layer gave."""
        return Following(reading, module, self._sequence, self.at_home, self._active.watch).run(given)

    @contextmanager
    def staying(self, why: str, layer: nn.Module) -> Iterator[None]:
        """What the running layer multiplies is computed here."""
        active = self._active
        before = active.staying, active.layer
        active.staying, active.layer = why, layer
        try:
            yield
        finally:
            active.staying, active.layer = before

    @property
    def why_staying(self) -> str | None:
        return self._active.staying

    def public(self, weight: Tensor) -> tuple[str, bool] | None:
        """The layer of a weight that may be sent, and whether it is selected."""
        outermost = self._active.outermost
        return self._parameters.find(weight, *outermost) if outermost is not None else None

    def in_enclave(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], why: str | None
    ) -> Any:
        """Calls `func` as it is, or our own kernel for it; the first time with these shapes, counts what it costs."""
        if func in self._free:
            return func(*args, **kwargs)
        path = self._active.paths[-1] if self._active.paths else ""
        ours = convolved(func, args, kwargs, self._following)
        if ours is None:
            found = pointwise(func, args, kwargs)
            found = multiplied(func, args, kwargs) if found is None else found
            ours = None if found is None else (found, Behind())
        if ours is not None:
            y, behind = ours
            flops = 2 * y.numel() * prod(_Call(*args, **kwargs).terms)
            self.report.count(path, _name(func), ENCLAVE, why or self._reason(args, kwargs), flops)
            self.at_home.convolved(y, behind)
            return y
        key = (func, _shapes(args), _shapes(tuple(kwargs.values())))
        if key in self._costs:
            result = func(*args, **kwargs)
        else:
            with FlopCounter() as counter:
                result = func(*args, **kwargs)
            self._costs[key] = counter.flops
            if not counter.products and func not in _SOMETIMES:
                self._free.add(func)
        flops = self._costs[key]
        if flops:
            self.report.count(path, _name(func), ENCLAVE, why or self._reason(args, kwargs), flops)
        return result

    def _following(self, weight: Tensor) -> Finished:
        """What stands behind a product with this weight, if that is all that the running layer does."""
        layer = self._active.layer
        whole = layer is not None and layer._parameters.get("weight") is weight
        return self._sequence.behind(layer) if whole and layer is not None else NOTHING

    def _reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if any(self.public(tensor) for tensor in _tensors((*args, *kwargs.values()))):
            return "only F.linear and the F.conv functions are masked"
        return "both operands are private"


class _Watch(TorchFunctionMode):
    """Sees each torch function that the model calls in this thread. It is off while one of them is handled."""

    def __init__(self, protection: Protection) -> None:
        super().__init__()
        self._protection = protection

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:  # its projections are to be seen too
                return _attention(*args, **kwargs)
        make = _PRODUCTS.get(func)
        why = self._protection.why_staying
        if make is None:
            found = self._protection.at_home(func, args, kwargs)
            if found is not None:
                return found
        else:
            self._protection.at_home.seen()
        if make is not None and why is None:
            call = _Call(*args, **kwargs)
            public = self._protection.public(call.weight)
            if public is None:
                why = "its weight is not a parameter of the model"
            elif not public[1]:
                why = "excluded by where"
            else:
                try:
                    op = make(call)
                except OpError as error:
                    why = str(error)
                else:
                    why = self._protection.stays(public[0], _name(func), op, call.weight)
                    if not why:
                        return self._protection.product(public[0], _name(func), op, call.input, call.weight, call.bias)
        return self._protection.in_enclave(func, args, kwargs, why)


class _Call:
    """The arguments of F.linear, torch.conv*d and torch.conv_transpose*d, by name."""

    def __init__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any) -> None:
        self.input = input
        self.weight = weight
        self.bias = bias
        self.rest = rest
        self.named = named

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.weight.shape[2:])

    @property
    def terms(self) -> tuple[int, ...]:
        """How many numbers each output is a sum over, of a convolution of single channels or a linear map."""
        return tuple(self.weight.shape[1:])

    def setting(self, place: int, name: str, default: Any) -> Any:
        value = self.rest[place] if place < len(self.rest) else self.named.get(name, default)
        if isinstance(value, int | str):
            return value
        numbers = tuple(value)
        return numbers[0] if len(numbers) == 1 else numbers


def _linear(call: _Call) -> BilinearOp:
    if call.weight.dim() != 2:
        raise OpError("its weight is not a matrix")
    return Linear()


def _conv(call: _Call) -> BilinearOp:
    return Conv.make(
        call.kernel,
        stride=call.setting(0, "stride", 1),
        padding=call.setting(1, "padding", 0),
        dilation=call.setting(2, "dilation", 1),
        groups=call.setting(3, "groups", 1),
    )


def _conv_transpose(call: _Call) -> BilinearOp:
    return ConvTranspose.make(
        call.kernel,
        stride=call.setting(0, "stride", 1),
        padding=call.setting(1, "padding", 0),
        output_padding=call.setting(2, "output_padding", 0),
        groups=call.setting(3, "groups", 1),
        dilation=call.setting(4, "dilation", 1),
    )


_PRODUCTS: dict[object, Callable[[_Call], BilinearOp]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _conv),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _conv_transpose),
}
# Functions that are products with some arguments only.
_SOMETIMES = {torch.einsum, torch.tensordot, torch.cdist, torch.matmul, Tensor.matmul, Tensor.__matmul__, *_PRODUCTS}

# torch's own function, without the question whether a function mode is active, which would send it back to us.
_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda *_: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(tuple(value))


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _shapes(values: tuple[Any, ...]) -> tuple[object, ...]:
    """Everything about arguments that decides their cost."""
    found: list[object] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((tuple(value.shape), value.dtype))
        elif isinstance(value, list | tuple):
            found.append(_shapes(tuple(value)))
        elif isinstance(value, int | float | str | bool | None):
            found.append(value)
    return tuple(found)
