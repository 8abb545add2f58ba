"""The modules of torch.nn whose forward is one bilinear op, and the op that each of them is.

A module is one of these exactly if its class did not change their forward: whatever else a subclass does, its
functional calls are seen by `nn.watch`.
"""

from __future__ import annotations

from functools import lru_cache

from torch import nn

from darknight.ops import BilinearOp, Conv, ConvTranspose, Linear

_conv = lru_cache(maxsize=1024)(Conv.make)  # the same op in every call, which remembers shapes
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KNOWN: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)


def kind_of(module: nn.Module) -> type[nn.Module] | None:
    """Which of the known modules this one computes as; None for every other."""
    if "forward" in vars(module) or not computes_as_known(module):  # somebody replaced it on the instance
        return None
    return next(kind for kind in KNOWN if isinstance(module, kind))


def computes_as_known(module: nn.Module) -> bool:
    """Whether neither the class nor anybody since replaced what a known module computes."""
    for kind in KNOWN:
        if isinstance(module, kind) and type(module).forward is kind.forward:
            inner = getattr(kind, "_conv_forward", None)
            own = getattr(type(module), "_conv_forward", None)
            return own is inner and "_conv_forward" not in vars(module)
    return False


def op_of(module: nn.Module, output_padding: tuple[int, ...] | None = None) -> BilinearOp:
    """The op that a known module is. `output_padding` stands in for the module's own (its output_size argument)."""
    if isinstance(module, nn.Linear):
        return Linear()
    if isinstance(module, _CONVOLUTIONS):
        return _conv(
            tuple(module.kernel_size),
            stride=tuple(module.stride),
            padding=module.padding if isinstance(module.padding, str) else tuple(module.padding),
            dilation=tuple(module.dilation),
            groups=module.groups,
            padding_mode=module.padding_mode,
        )
    assert isinstance(module, _TRANSPOSED)
    extra = module.output_padding if output_padding is None else output_padding
    return ConvTranspose.make(
        tuple(module.kernel_size),
        stride=tuple(module.stride),
        padding=tuple(module.padding),  # type: ignore[arg-type]
        output_padding=tuple(extra),
        dilation=tuple(module.dilation),
        groups=module.groups,
    )
