"""What stands behind a layer: known beforehand in a Sequential, and told from one backward pass to the next.

A layer or batch normalisation whose result an activation overwrites at once may give what the activation would, and a
layer what a max pooling behind that would, if nobody can see the difference. That is known where torch's own Sequential
calls them in turn and no hook, mode or method of somebody else's stands in between; everywhere else its result is its
own, and what stands behind it is computed when it is called.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as _hooked_everywhere
from torch.overrides import _get_current_function_mode as _innermost_mode

from darknight.kernels.compiled_layers import Limits, Returned, Window
from darknight.nn.pooling import window_of


@dataclass(eq=False)
class Behind:
    """Between two functions, of which the second gets what the first gave. One for each call.

    limits: what the activation cuts to that stands here, if one does. window: of the max pooling behind the activation,
    if that stands here too. channel: the axis of what is passed on. through: the gradient that came through an
    activation whose own backward pass was left out.
    """

    limits: Limits | None = None
    window: Window | None = None
    channel: int = 1
    through: Tensor | None = field(default=None, repr=False)
    _told: Returned | None = field(default=None, repr=False)
    _version: int = 0

    @property
    def done(self) -> tuple[Limits | Window, ...]:
        """What was done to what is passed on, in this order, if it was done at once."""
        return tuple(each for each in (self.limits, self.window) if each is not None)

    def tell(self, found: Returned) -> Tensor:
        """The backward pass of the second function returns this gradient, and knows what it found out about it."""
        self._told, self._version = found, found.grad._version
        return found.grad

    def told(self, grad: Tensor) -> Returned | None:
        """What is known of the gradient that came to the first function; None if it is another one, or was changed."""
        told, self._told = self._told, None
        return told if told is not None and told.grad is grad and grad._version == self._version else None


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Sequence(threading.local):
    """In this thread: the module of a Sequential that is being called, and those that are called after it."""

    def __init__(self) -> None:
        self._now: list[nn.Module] = []

    def run(self, modules: nn.Sequential, input: Any, mode: object) -> Any:
        """What nn.Sequential.forward does. mode: the one that sees the functions of the model."""
        every = list(modules)
        for place, module in enumerate(every):
            self._now = every[place:] if _sees_all(mode) else []
            try:
                input = module(input)
            finally:
                self._now = []
        return input

    def behind(self, module: nn.Module) -> tuple[Limits | None, Window | None]:
        """What the result of `module`, which is running, will be cut to before anybody sees it, and pooled over."""
        now, self._now = self._now, []
        if len(now) < 2 or now[0] is not module or not _adjacent(*now[:2]):
            return None, None
        limits = _limits_of(now[1])
        pooled = limits is not None and len(now) > 2 and _adjacent(*now[1:3])
        return limits, _window_of(now[2]) if pooled else None

    def norm_limits(self) -> Limits | None:
        """The same for the batch normalisation that is running, if it is torch's own; of the activation alone."""
        if not self._now or type(self._now[0]) not in _NORMS or "forward" in vars(self._now[0]):
            return None
        return self.behind(self._now[0])[0]


def _adjacent(module: nn.Module, following: nn.Module) -> bool:
    """Whether nobody sees what goes from one to the other, if the second is called with what the first gave."""
    return _unobserved(module) and not module._forward_hooks and _unobserved(following)


def _unobserved(module: nn.Module) -> bool:
    """Whether calling it is calling its forward, and nobody sees what goes in."""
    hooks = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    ordinary = type(module).__call__ is nn.Module.__call__ and type(module)._call_impl is nn.Module._call_impl
    everywhere = _hooked_everywhere()  # type: ignore[no-untyped-call]
    return ordinary and not everywhere and not any(hooks) and module._compiled_call_impl is None


def _limits_of(module: nn.Module) -> Limits | None:
    """What one of torch's activations cuts to, if it does so in place."""
    if "forward" in vars(module):
        return None
    if type(module) is nn.ReLU:
        return (0.0, inf) if module.inplace else None
    if type(module) in (nn.ReLU6, nn.Hardtanh):
        assert isinstance(module, nn.Hardtanh)
        return (float(module.min_val), float(module.max_val)) if module.inplace else None
    return None


def _window_of(module: nn.Module) -> Window | None:
    """What one of torch's max poolings looks at, if it is as a kernel of ours."""
    if type(module) is not nn.MaxPool2d or "forward" in vars(module):
        return None
    given = (module.kernel_size, module.stride, module.padding, module.dilation)
    return window_of(*given, module.ceil_mode, module.return_indices)


def _sees_all(mode: object) -> bool:
    """Whether `mode` is the first to see the next torch function, and nobody sees what is below it."""
    innermost = _innermost_mode()  # type: ignore[no-untyped-call]
    return torch._C._is_torch_function_enabled() and innermost is mode and not torch._C._len_torch_dispatch_stack()
