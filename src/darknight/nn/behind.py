"""What stands behind a layer: known beforehand in some forwards, and told from one backward pass to the next.

A layer or batch normalisation may give what the activation behind it would, a layer what a max pooling behind that
would or, in evaluation, a normalisation before it, and a normalisation what comes of a sum with something else, if
nobody can see the difference. That is known
where torch's own Sequential calls them in turn, or a forward that was read (nn.reading), and no hook, mode or method of
somebody else's stands in between; everywhere else its result is its own, and what stands behind it is computed when it
is called.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as _hooked_everywhere
from torch.overrides import _get_current_function_mode as _innermost_mode

from darknight.kernels.compiled_layers import Limits, Returned, Window
from darknight.nn.pooling import ordinary, window_of


@dataclass(frozen=True, eq=False)
class Norm:
    """A batch normalisation in evaluation, with what its module has when the layer before it is called."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    epsilon: float

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.mean, self.variance, self.weight, self.bias

    def is_called(
        self,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> bool:
        """Whether it is this one, by the arguments of F.batch_norm behind its input."""
        given = zip(self.operands, (mean, variance, weight, bias), strict=True)
        return not training and eps == self.epsilon and all(mine is theirs for mine, theirs in given)


class Finished(NamedTuple):
    """What is done to the result of a layer before anybody sees it, in this order."""

    norm: Norm | None = None
    limits: Limits | None = None
    window: Window | None = None


NOTHING = Finished()


@dataclass(eq=False)
class Behind:
    """Between two functions, of which the second gets what the first gave. One for each call.

    norm: the batch normalisation in evaluation that stands here and was done at once. limits: what the activation cuts
    to that stands here, if one does. window: of the max pooling behind the activation, if that stands here too.
    channel: the axis of what is passed on. through: the gradient that came through an activation whose own backward
    pass was left out.
    """

    norm: Norm | None = None
    limits: Limits | None = None
    window: Window | None = None
    channel: int = 1
    through: Tensor | None = field(default=None, repr=False)
    _told: Returned | None = field(default=None, repr=False)
    _version: int = 0

    @property
    def done(self) -> tuple[Norm | Limits | Window, ...]:
        """What was done to what is passed on, in this order, if it was done at once."""
        return tuple(each for each in (self.norm, self.limits, self.window) if each is not None)

    def tell(self, found: Returned) -> Tensor:
        """The backward pass of the second function returns this gradient, and knows what it found out about it."""
        self._told, self._version = found, found.grad._version
        return found.grad

    def told(self, grad: Tensor) -> Returned | None:
        """What is known of the gradient that came to the first function; None if it is another one, or was changed."""
        told, self._told = self._told, None
        return told if told is not None and told.grad is grad and grad._version == self._version else None


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(eq=False)
class Addend:
    """What is added to the result of a module before anybody sees it. taken: whether that was done at once."""

    value: Tensor = field(repr=False)
    taken: bool = False


# What gets the result of a module: another module, or a function, of which it is known what it does.
Next = nn.Module | Addend | Limits | Window


class Sequence(threading.local):
    """In this thread: the module that is being called, and what gets its result, one after the other."""

    def __init__(self) -> None:
        self._now: list[Next] = []

    def run(self, modules: nn.Sequential, input: Any, mode: object) -> Any:
        """What nn.Sequential.forward does. mode: the one that sees the functions of the model."""
        now, self._now = self._now, []
        known = bool(now) and now[0] is modules and unseen(modules)
        every, rest = list(modules), now[1:] if known else []
        for place in range(len(every)):
            input = self.call([*every[place:], *rest], input, mode)
        return input

    def call(self, now: list[Next], input: Any, mode: object) -> Any:
        """Calls the first of them, of which the others get the result, and of what they gave, in turn."""
        module = now[0]
        assert isinstance(module, nn.Module)
        self._now = now if sees_all(mode) else []
        try:
            return module(input)
        finally:
            self._now = []

    def behind(self, module: nn.Module) -> Finished:
        """What is done to the result of `module`, which is running, before anybody sees it.

        A normalisation is left to itself if something is added to what it gives: it does that too, in one pass.
        """
        now, self._now = self._now, []
        if len(now) < 2 or now[0] is not module or not _adjacent(*now[:2]):
            return NOTHING
        norm = _norm_of(now[1])
        if norm is not None:
            if len(now) > 2 and isinstance(now[2], Addend):
                return NOTHING
            now = now[1:]
            if len(now) < 2 or not _adjacent(*now[:2]):
                return Finished(norm)
        limits = _limits_of(now[1])
        pooled = limits is not None and len(now) > 2 and _adjacent(*now[1:3])
        return Finished(norm, limits, _window_of(now[2]) if pooled else None)

    def behind_norm(self) -> tuple[Limits | None, Addend | None]:
        """What is added to the result of the batch normalisation that is running, and what it is cut to then.

        Of torch's own normalisations alone.
        """
        now = self._now
        norm = now[0] if now else None
        if not isinstance(norm, NORMS) or type(norm) not in NORMS or "forward" in vars(norm):
            return None, None
        addend = now[1] if len(now) > 1 and isinstance(now[1], Addend) else None
        if addend is None:
            following = self.behind(norm)
            return following.limits if following.norm is None else None, None
        self._now = []
        if not _adjacent(norm, addend):
            return None, None
        cut = len(now) > 2 and _adjacent(addend, now[2])
        return _limits_of(now[2]) if cut else None, addend


def _adjacent(first: Next, following: Next) -> bool:
    """Whether nobody sees what goes from one to the other, if the second is called with what the first gave."""
    given = not isinstance(first, nn.Module) or unseen(first)
    return given and (not isinstance(following, nn.Module) or _unobserved(following))


def unseen(module: nn.Module) -> bool:
    """Whether calling it is calling its forward, and nobody sees what goes in or comes out."""
    return _unobserved(module) and not module._forward_hooks


def _unobserved(module: nn.Module) -> bool:
    """Whether calling it is calling its forward, and nobody sees what goes in."""
    hooks = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    ordinary = type(module).__call__ is nn.Module.__call__ and type(module)._call_impl is nn.Module._call_impl
    everywhere = _hooked_everywhere()  # type: ignore[no-untyped-call]
    return ordinary and not everywhere and not any(hooks) and module._compiled_call_impl is None


def _norm_of(module: Next) -> Norm | None:
    """What one of torch's batch normalisations does, if that is the same for every batch."""
    if type(module) not in NORMS or not isinstance(module, NORMS):
        return None
    if module.training or not {"forward", "_check_input_dim"}.isdisjoint(vars(module)):
        return None
    mean, variance = module.running_mean, module.running_var
    if mean is None or variance is None or not ordinary(mean, variance, module.weight, module.bias):
        return None
    return Norm(mean, variance, module.weight, module.bias, module.eps)


def _limits_of(module: Next) -> Limits | None:
    """What one of torch's activations cuts to."""
    if isinstance(module, tuple):
        return module
    if not isinstance(module, nn.Module) or "forward" in vars(module):
        return None
    if type(module) is nn.ReLU:
        return (0.0, inf)
    if type(module) in (nn.ReLU6, nn.Hardtanh):
        assert isinstance(module, nn.Hardtanh)
        return (float(module.min_val), float(module.max_val))
    return None


def _window_of(module: Next) -> Window | None:
    """What one of torch's max poolings looks at, if it is as a kernel of ours."""
    if isinstance(module, Window):
        return module
    if type(module) is not nn.MaxPool2d or "forward" in vars(module):
        return None
    given = (module.kernel_size, module.stride, module.padding, module.dilation)
    return window_of(*given, module.ceil_mode, module.return_indices)


def needs_grad(*operands: Tensor | None) -> bool:
    """Whether a gradient may come back to one of them."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in operands)


def sees_all(mode: object) -> bool:
    """Whether `mode` is the first to see the next torch function, and nobody sees what is below it."""
    innermost = _innermost_mode()  # type: ignore[no-untyped-call]
    return torch._C._is_torch_function_enabled() and innermost is mode and not torch._C._len_torch_dispatch_stack()
