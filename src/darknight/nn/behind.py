"""What stands behind a layer: known beforehand in a Sequential, and told from one backward pass to the next.

A layer or batch normalisation whose result an activation overwrites at once may give what the activation would, if
nobody can see the difference. That is known where torch's own Sequential calls the two in turn and no hook, mode or
method of somebody else's stands in between; everywhere else its result is its own, and the activation is computed when
it is called.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as _hooked_everywhere
from torch.overrides import _get_current_function_mode as _innermost_mode

from darknight.kernels.compiled_layers import Limits, Returned


@dataclass(eq=False)
class Behind:
    """Between two functions, of which the second gets what the first gave. One for each call.

    limits: what the activation cuts to that stands here, if one does. channel: the axis of what is passed on. through:
    the gradient that came through an activation whose own backward pass was left out.
    """

    limits: Limits | None = None
    channel: int = 1
    through: Tensor | None = field(default=None, repr=False)
    _told: Returned | None = field(default=None, repr=False)
    _version: int = 0

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
    """In this thread: the module of a Sequential that is being called, and the one that is called with its result."""

    def __init__(self) -> None:
        self._pair: tuple[nn.Module, nn.Module | None] | None = None

    def run(self, modules: nn.Sequential, input: Any, mode: object) -> Any:
        """What nn.Sequential.forward does. mode: the one that sees the functions of the model."""
        every = list(modules)
        for pair in zip_longest(every, every[1:]):
            self._pair = pair if _sees_all(mode) else None
            try:
                input = pair[0](input)
            finally:
                self._pair = None
        return input

    def limits(self, module: nn.Module) -> Limits | None:
        """What the result of `module`, which is running, will be cut to before anybody sees it; None if unknown."""
        pair, self._pair = self._pair, None
        if pair is None or pair[0] is not module or pair[1] is None:
            return None
        if not _unobserved(module) or module._forward_hooks or not _unobserved(pair[1]):
            return None
        return _limits_of(pair[1])

    def norm_limits(self) -> Limits | None:
        """The same for the batch normalisation that is running, if it is torch's own."""
        module = self._pair[0] if self._pair is not None else None
        own = module is not None and type(module) in _NORMS and "forward" not in vars(module)
        return self.limits(module) if module is not None and own else None


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


def _sees_all(mode: object) -> bool:
    """Whether `mode` is the first to see the next torch function, and nobody sees what is below it."""
    innermost = _innermost_mode()  # type: ignore[no-untyped-call]
    return torch._C._is_torch_function_enabled() and innermost is mode and not torch._C._len_torch_dispatch_stack()
