"""The layers that a description may have: an allow-list, with the arguments of each.

What is not here cannot be built, whatever torch has. In-place layers are left out: in front of a shortcut they would
change what it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from darknight.errors import UsageError
from darknight.models.layer_arguments import Argument, Count, Flag, Layers, Number, Padding, Shape, Sizes, Word

_Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_CHANNELS, _FEATURES = Count(1, 1 << 16), Count(1, 1 << 20)
_WINDOW, _MARGIN = Count(1, 1 << 10), Count(0, 1 << 10)
_EPSILON, _SHARE = Number(1e-12, 1.0), Number(0.0, 1.0)


class Residual(nn.Module):
    """layers(x) + shortcut(x), or + x where there is no shortcut."""

    def __init__(self, layers: nn.Sequential, shortcut: nn.Sequential | None = None) -> None:
        super().__init__()
        self.layers = layers
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        added: Tensor = x if self.shortcut is None else self.shortcut(x)
        if found.shape != added.shape:  # torch would stretch one of them
            raise UsageError(
                f"its layers make {tuple(found.shape[1:])} of an example, and its shortcut {tuple(added.shape[1:])}. "
                "Give it a shortcut that makes the same."
            )
        return found + added


@dataclass(frozen=True, kw_only=True)
class LayerType:
    """make: called with the arguments by name, lists of layers as nn.Sequential. required: those without a default.

    axes: how many its input has beside examples and channels; None for any number. channels: the argument that says how
    many channels there are. torch is not as strict: it takes examples for channels, and says less on the meta device.
    """

    make: Callable[..., nn.Module]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    axes: int | None = None
    channels: str | None = None


def _convolution(make: Callable[..., nn.Module], axes: int) -> LayerType:
    window, margin = Sizes(axes, _WINDOW), Sizes(axes, _MARGIN)
    return LayerType(
        make=make,
        arguments={
            **_both_convolutions(axes),
            "padding": Padding(margin, Word(("same", "valid"))),
            "dilation": window,
            "padding_mode": Word(("zeros", "reflect", "replicate", "circular")),
        },
        required=("in_channels", "out_channels", "kernel_size"),
        axes=axes,
        channels="in_channels",
    )


def _transposed(kind: type[_Transposed], axes: int) -> LayerType:
    margin = Sizes(axes, _MARGIN)

    def make(**arguments: Any) -> nn.Module:
        layer = kind(**arguments)
        for extra, stride, dilation in zip(layer.output_padding, layer.stride, layer.dilation, strict=True):
            if extra >= max(stride, dilation):  # torch notices when it computes, but not on the meta device
                raise ValueError("output_padding must be smaller than stride or dilation")
        return layer

    return LayerType(
        make=make,
        arguments={
            **_both_convolutions(axes),
            "padding": margin,
            "output_padding": margin,
            "dilation": Sizes(axes, _WINDOW),
        },
        required=("in_channels", "out_channels", "kernel_size"),
        axes=axes,
        channels="in_channels",
    )


def _both_convolutions(axes: int) -> dict[str, Argument]:
    window = Sizes(axes, _WINDOW)
    return {
        "in_channels": _CHANNELS,
        "out_channels": _CHANNELS,
        "kernel_size": window,
        "stride": window,
        "groups": _CHANNELS,
        "bias": Flag(),
    }


def _batch_norm(make: Callable[..., nn.Module], axes: int | None) -> LayerType:
    return LayerType(
        make=make,
        arguments={"num_features": _FEATURES, "eps": _EPSILON, "momentum": _SHARE, "affine": Flag()},
        required=("num_features",),
        axes=axes,
        channels="num_features",
    )


def _pool(make: Callable[..., nn.Module], axes: int, more: Mapping[str, Argument]) -> LayerType:
    window = Sizes(axes, _WINDOW)
    shared: dict[str, Argument] = {
        "kernel_size": window,
        "stride": window,
        "padding": Sizes(axes, _MARGIN),
        "ceil_mode": Flag(),
    }
    return LayerType(make=make, arguments={**shared, **more}, required=("kernel_size",), axes=axes)


def _adaptive(make: Callable[..., nn.Module], axes: int) -> LayerType:
    return LayerType(make=make, arguments={"output_size": Sizes(axes, _WINDOW)}, required=("output_size",), axes=axes)


LAYERS: dict[str, LayerType] = {
    "Conv1d": _convolution(nn.Conv1d, 1),
    "Conv2d": _convolution(nn.Conv2d, 2),
    "Conv3d": _convolution(nn.Conv3d, 3),
    "ConvTranspose1d": _transposed(nn.ConvTranspose1d, 1),
    "ConvTranspose2d": _transposed(nn.ConvTranspose2d, 2),
    "ConvTranspose3d": _transposed(nn.ConvTranspose3d, 3),
    "Linear": LayerType(
        make=nn.Linear,
        arguments={"in_features": _FEATURES, "out_features": _FEATURES, "bias": Flag()},
        required=("in_features", "out_features"),
    ),
    "BatchNorm1d": _batch_norm(nn.BatchNorm1d, None),
    "BatchNorm2d": _batch_norm(nn.BatchNorm2d, 2),
    "BatchNorm3d": _batch_norm(nn.BatchNorm3d, 3),
    "LayerNorm": LayerType(
        make=nn.LayerNorm,
        arguments={
            "normalized_shape": Shape(4, _FEATURES),
            "eps": _EPSILON,
            "elementwise_affine": Flag(),
            "bias": Flag(),
        },
        required=("normalized_shape",),
    ),
    "GroupNorm": LayerType(
        make=nn.GroupNorm,
        arguments={"num_groups": _CHANNELS, "num_channels": _CHANNELS, "eps": _EPSILON, "affine": Flag()},
        required=("num_groups", "num_channels"),
        channels="num_channels",
    ),
    "ReLU": LayerType(make=nn.ReLU),
    "ReLU6": LayerType(make=nn.ReLU6),
    "LeakyReLU": LayerType(make=nn.LeakyReLU, arguments={"negative_slope": _SHARE}),
    "ELU": LayerType(make=nn.ELU, arguments={"alpha": Number(1e-6, 1e3)}),
    "GELU": LayerType(make=nn.GELU, arguments={"approximate": Word(("none", "tanh"))}),
    "SiLU": LayerType(make=nn.SiLU),
    "Hardswish": LayerType(make=nn.Hardswish),
    "Sigmoid": LayerType(make=nn.Sigmoid),
    "Tanh": LayerType(make=nn.Tanh),
    "MaxPool1d": _pool(nn.MaxPool1d, 1, {"dilation": Sizes(1, _WINDOW)}),
    "MaxPool2d": _pool(nn.MaxPool2d, 2, {"dilation": Sizes(2, _WINDOW)}),
    "MaxPool3d": _pool(nn.MaxPool3d, 3, {"dilation": Sizes(3, _WINDOW)}),
    "AvgPool1d": _pool(nn.AvgPool1d, 1, {"count_include_pad": Flag()}),
    "AvgPool2d": _pool(nn.AvgPool2d, 2, {"count_include_pad": Flag()}),
    "AvgPool3d": _pool(nn.AvgPool3d, 3, {"count_include_pad": Flag()}),
    "AdaptiveAvgPool1d": _adaptive(nn.AdaptiveAvgPool1d, 1),
    "AdaptiveAvgPool2d": _adaptive(nn.AdaptiveAvgPool2d, 2),
    "AdaptiveAvgPool3d": _adaptive(nn.AdaptiveAvgPool3d, 3),
    "Flatten": LayerType(make=nn.Flatten, arguments={"start_dim": Count(1, 4), "end_dim": Count(-1, 4)}),
    "Dropout": LayerType(make=nn.Dropout, arguments={"p": Number(0.0, 0.99)}),
    "Dropout2d": LayerType(make=nn.Dropout2d, arguments={"p": Number(0.0, 0.99)}, axes=2),
    "Sequential": LayerType(make=lambda layers: layers, arguments={"layers": Layers()}, required=("layers",)),
    "Residual": LayerType(make=Residual, arguments={"layers": Layers(), "shortcut": Layers()}, required=("layers",)),
}
