"""Layers that stay in the enclave, by kernels of our own where torch's take several times as long.

While a protected model runs, batch normalisation and max pooling in float32 are computed by kernels/layers.c, in
whatever module or function they stand. Results agree with torch's within the rounding of float32, and are the same on
every processor that has the kernels. Everything else, and everything where nothing was compiled, is torch's own.
Depthwise convolutions are in `depthwise`, fully connected layers in `few_rows`, 1x1 convolutions in `one_by_one`.

An activation that overwrites what was just normalised (ReLU or ReLU6 with inplace=True) is not derived by itself:
batch normalisation, whose backward pass reads the same numbers, stops the gradient where the activation did. Right
behind a protected layer, the backward passes of both also find out what that of the layer needs to know. An activation
that was known beforehand (nn.behind) was computed before it is called, and so was a sum before it, or in evaluation a
normalisation.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from darknight.kernels import compiled_layers as kernels
from darknight.kernels.compiled_layers import Library, Limits, Normalised
from darknight.nn.behind import Addend, Behind, Norm, Sequence, needs_grad
from darknight.nn.pooling import ordinary, pooled, window_of

_RELU = (0.0, math.inf)


class _Latest(threading.local):
    """What the latest function in this thread gave, if it multiplied or normalised.

    product: what the latest protected layer gave, also if there were functions since that had nothing to do with it.
    """

    def __init__(self) -> None:
        self.result: Callable[[], Tensor | None] = lambda: None
        self.behind = Behind()
        self.multiplied = False
        self.done: tuple[object, ...] = ()  # what was done to it already, of what is called next
        self.product: tuple[Callable[[], Tensor | None], Behind] = (lambda: None, Behind())


class Staying:
    """Sees every torch function of a protected model that is no product."""

    def __init__(self, sequence: Sequence) -> None:
        self._latest = _Latest()
        self._sequence = sequence

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result, if there is a kernel for this call; None if it is torch's."""
        if func is Tensor.dim:  # normalisations ask that first; what was done already does not show in it
            return None
        latest, behind, multiplied = self._latest.result(), self._latest.behind, self._latest.multiplied
        done = self._latest.done
        self._latest.result = lambda: None
        right_behind = latest is not None and bool(args) and args[0] is latest
        if latest is not None and right_behind and done:
            assert _calls(done[0], func, *args[1:], **kwargs), "nothing but what was done already can come next"
            return self._given(latest, behind, multiplied=multiplied, done=done[1:]) if done[1:] else latest
        overwrites = func in _ACTIVATIONS and _in_place(func, *args[1:], **kwargs)
        limits = limits_of(func, *args[1:], **kwargs) if overwrites else None
        library = kernels.chosen()
        if library is None or torch.is_autocast_enabled("cpu"):
            return None
        if func is F.batch_norm:
            return self._normalised(library, *args, **kwargs)
        if func is F.max_pool2d:
            return pooled(library, *args, **kwargs)
        if limits is None or latest is None or not right_behind:
            return None
        if not (torch.is_grad_enabled() and latest.requires_grad):
            return None
        if multiplied:
            return _cut(library, latest, limits, behind)
        behind.limits = limits
        clipped: Tensor = _Clipped.apply(latest, limits, behind)  # type: ignore[no-untyped-call]
        return clipped

    def multiplied(self, y: Tensor, behind: Behind) -> None:
        """A protected layer gave y, with what stands behind it."""
        self._given(y, behind, multiplied=True)
        self._latest.product = (weakref.ref(y), behind)

    def convolved(self, y: Tensor, behind: Behind) -> None:
        """A layer that stays gave y, with what was done to it already."""
        if behind.done:
            self._given(y, behind, multiplied=False)

    def _given(self, y: Tensor, behind: Behind, *, multiplied: bool, done: tuple[object, ...] | None = None) -> Tensor:
        latest = self._latest
        latest.result, latest.behind, latest.multiplied = weakref.ref(y), behind, multiplied
        latest.done = behind.done if done is None else done
        return y

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is called here stands between a layer and what is behind it, and has nothing to do with them."""
        product = self._latest.product
        yield
        self._latest.product = product

    def seen(self) -> None:
        """Another function was called: what the latest gave may be used by it."""
        self._latest.result = lambda: None

    def _normalised(
        self,
        library: Library,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor | None:
        if not ordinary(input, weight, bias, running_mean, running_var):
            return None
        derived = needs_grad(input, weight, bias)
        if not training:
            if derived or running_mean is None or running_var is None:
                return None
            limits, added = self._behind_norm(input, derived=False)
            scaled = _by_running(library, input, running_mean, running_var, weight, bias, eps, limits, added)
            return None if scaled is None else self._normal(scaled, Behind(limits=limits), added)
        running = None if running_mean is None or running_var is None else (running_mean, running_var)
        if not kernels.can_normalise(input, weight, bias, running):
            return None
        limits, added = self._behind_norm(input, derived=True)
        behind, (y, before) = Behind(limits=limits), self._latest.product
        more = None if added is None else added.value
        result: Tensor
        if derived or needs_grad(more):
            result = _Normalised.apply(  # type: ignore[no-untyped-call]
                input, weight, bias, more, (library, running, momentum, eps, behind, before if y() is input else None)
            )
        else:
            found = kernels.normalise(library, input, weight, bias, running, momentum, eps, limits, more)
            assert found is not None, "it was asked before"
            result = found[0]
        return self._normal(result, behind, added)

    def _behind_norm(self, input: Tensor, *, derived: bool) -> tuple[Limits | None, Addend | None]:
        """What stands behind the normalisation that is running, as far as that can be done with it.

        derived: whether it can be derived then.
        """
        limits, added = self._sequence.behind_norm()
        if added is None:
            return limits, None
        fits = (
            ordinary(added.value) and kernels.can_add(input, added.value) and (derived or not needs_grad(added.value))
        )
        return (limits, added) if fits else (None, None)

    def _normal(self, y: Tensor, behind: Behind, added: Addend | None) -> Tensor:
        """What a normalisation gives, perhaps a sum already: an activation that was not known is no concern of that."""
        if added is not None:
            added.taken = True
            if behind.limits is None:
                return y
        return self._given(y, behind, multiplied=False)


# --- batch normalisation ----------------------------------------------------------------------------------------------
class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        added: Tensor | None,
        call: tuple[Library, tuple[Tensor, Tensor] | None, float, float, Behind, Behind | None],
    ) -> Tensor:
        library, running, momentum, epsilon, behind, before = call
        found = kernels.normalise(library, x, weight, bias, running, momentum, epsilon, behind.limits, added)
        assert found is not None, "it was asked before"
        y, by = found
        cut = added is not None and behind.limits is not None  # then y alone tells what the activation let pass
        ctx.save_for_backward(x, weight, bias, y if cut else None, by.scale, by.shift, by.mean, by.inverse)
        ctx.call = (library, epsilon, behind, before, behind.limits is not None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        library, epsilon, behind, before, finished = ctx.call
        x, weight, bias, y, *by = ctx.saved_tensors
        scale, shift = by[:2]
        limits, through, behind.through = behind.limits, behind.through, None
        if limits is not None and not finished and through is not grad:
            # Somebody used it before the activation did, and no mode saw that (torch.jit.script): only what came
            # through the activation is stopped.
            grad = grad if through is None else grad - _stopped(through, x, scale, shift, limits)
            limits = None
        found = None
        if not torch.is_grad_enabled():
            found = kernels.derive(library, x, grad.contiguous(), Normalised(*by), limits, y)
        if found is None:  # it is to be derived again (create_graph=True), or came in another dtype
            passed = grad if y is None else grad.masked_fill((y <= limits[0]) | (y >= limits[1]), 0.0)
            within = limits if y is None else None
            grads = [*_by_torch(x, weight, bias, passed, epsilon, within), passed]
        else:
            back, *others = found
            grads = [back.grad if before is None else before.tell(back), *others]
        wanted = ctx.needs_input_grad[:4]
        return *(each if asked else None for each, asked in zip(grads, wanted, strict=True)), None


def _stopped(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, limits: Limits) -> Tensor:
    """What an activation in place behind x * scale + shift lets not pass."""
    by_channel = (-1, *[1] * (x.dim() - 2))
    y = x * scale.view(by_channel) + shift.view(by_channel)
    return grad.masked_fill((y > limits[0]) & (y < limits[1]), 0.0)


def _by_torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor, epsilon: float, limits: Limits | None
) -> list[Tensor | None]:
    """The same gradients, by torch and with a graph of their own."""
    operands = [each for each in (x, weight, bias) if each is not None and each.requires_grad]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        y = F.batch_norm(x, None, None, weight, bias, training=True, eps=epsilon)
        if limits is not None:
            y = F.relu(y) if limits == _RELU else F.hardtanh(y, *limits)
        found = iter(torch.autograd.grad(y, operands, grad, create_graph=again))
    return [next(found) if each is not None and each.requires_grad else None for each in (x, weight, bias)]


def _by_running(
    library: Library,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    limits: Limits | None,
    added: Addend | None,
) -> Tensor | None:
    """In evaluation: the same scale for every batch."""
    by = kernels.by_running(library, mean, variance, weight, bias, epsilon)
    if by is None:
        return None
    return kernels.affine(library, x, by.scale, by.shift, limits, None if added is None else added.value)


# --- activations in place ---------------------------------------------------------------------------------------------
def _clip(y: Tensor, limits: Limits) -> Tensor:
    return y.relu_() if limits == _RELU else F.hardtanh(y, *limits, inplace=True)


class _Clipped(torch.autograd.Function):
    """Behind a normalisation. The gradient passes: the normalisation stops what is to be stopped."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, limits: Limits, behind: Behind) -> Tensor:
        ctx.mark_dirty(y)
        ctx.behind = behind
        return _clip(y, limits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.behind.through = grad
        return grad, None, None


def _cut(library: Library, y: Tensor, limits: Limits, behind: Behind) -> Tensor | None:
    if not kernels.can_come_back(y):
        return None
    cut: Tensor = _Cut.apply(y, limits, behind, library)  # type: ignore[no-untyped-call]
    return cut


class _Cut(torch.autograd.Function):
    """Behind a protected layer, which is told what its gradient sums up to."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, limits: Limits, behind: Behind, library: Library) -> Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(_clip(y, limits))
        ctx.call = (limits, behind, library)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,), (limits, behind, library) = ctx.saved_tensors, ctx.call
        found = None
        if not torch.is_grad_enabled():
            found = kernels.come_back(library, grad.contiguous(), behind.channel, y, limits)
        if found is None:
            return grad.masked_fill((y <= limits[0]) | (y >= limits[1]), 0.0), None, None, None
        return behind.tell(found), None, None, None


_RELUS = {F.relu, torch.relu, Tensor.relu, F.relu_, torch.relu_, Tensor.relu_}
_ACTIVATIONS = {*_RELUS, F.relu6, F.hardtanh, F.hardtanh_}
_ALWAYS = {F.relu_, torch.relu_, Tensor.relu_, F.hardtanh_}


def _calls(done: object, func: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether this call, with these arguments behind its input, is what was done already."""
    if isinstance(done, Norm):
        return func is F.batch_norm and done.is_called(*args, **kwargs)
    return done == (window_of(*args, **kwargs) if func is F.max_pool2d else limits_of(func, *args, **kwargs))


def limits_of(func: Any, *args: Any, **kwargs: Any) -> Limits | None:
    """Between which values an activation lets a gradient pass, by its arguments behind the input; None for others."""
    if func in _RELUS:
        return _RELU
    if func is F.relu6:
        return (0.0, 6.0)
    if func is not F.hardtanh and func is not F.hardtanh_:
        return None
    values = {**dict(zip(("min_val", "max_val"), args, strict=False)), **kwargs}
    return float(values.get("min_val", -1.0)), float(values.get("max_val", 1.0))


def _in_place(func: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether an activation overwrites its input."""
    if func is F.relu or func is F.relu6:
        return bool(args[0] if args else kwargs.get("inplace", False))
    if func is F.hardtanh:
        return bool(args[2] if len(args) > 2 else kwargs.get("inplace", False))
    return func in _ALWAYS
