"""Transposed convolutions: the passes of a convolution in other roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

from torch import Tensor

from darknight.errors import OpError
from darknight.ops.conv import Conv, per_axis
from darknight.ops.op import BilinearOp, Shape, Slide, settings_of
from darknight.ops.padding import Padding
from darknight.types import OpSpec


@dataclass(frozen=True)
class ConvTranspose(BilinearOp):
    """x (example, in, *spatial), w (in, out / groups, *kernel), as torch.nn.ConvTranspose1d/2d/3d.

    It is the transpose of `conv`, which leads from y's shape to x's: y takes the role of conv's input and x that of its
    output, so forward is conv's grad_input, grad_input is conv's forward, and grad_weight swaps its two arguments.
    """

    conv: Conv
    output_padding: tuple[int, ...]

    name: ClassVar[str] = "conv_transpose"
    output_axis: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not self.conv.padding.symmetric_zeros:
            raise OpError("conv_transpose: only symmetric padding with zeros is defined.")
        if len(self.output_padding) != self.conv.axes:
            raise OpError(f"conv_transpose: output_padding needs one number for each of {self.conv.axes} axes.")
        # torch allows more where the dilation is larger, but then conv does not lead from y's shape to x's.
        for extra, step in zip(self.output_padding, self.conv.stride, strict=True):
            if not 0 <= extra < step:
                raise OpError(f"conv_transpose: output_padding {extra}; needs at least 0 and less than stride {step}.")

    @classmethod
    def make(
        cls,
        kernel: tuple[int, ...],
        *,
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
    ) -> ConvTranspose:
        """From the arguments of torch.nn.ConvTranspose*d."""
        axes = len(kernel)
        amounts = tuple((amount, amount) for amount in per_axis(padding, axes))
        conv = Conv(
            stride=per_axis(stride, axes), padding=Padding(amounts), dilation=per_axis(dilation, axes), groups=groups
        )
        return cls(conv=conv, output_padding=per_axis(output_padding, axes))

    def spec(self) -> OpSpec:
        return OpSpec(self.name, (*self.conv.spec().settings, ("output_padding", self.output_padding)))

    @classmethod
    def from_spec(cls, spec: OpSpec) -> Self:
        extra = tuple(setting for setting in spec.settings if setting[0] == "output_padding")
        rest = tuple(setting for setting in spec.settings if setting[0] != "output_padding")
        output_padding = settings_of(OpSpec(spec.name, extra), ("output_padding",))["output_padding"]
        return cls(conv=Conv.from_spec(OpSpec(spec.name, rest)), output_padding=output_padding)

    @property
    def groups(self) -> int:  # type: ignore[override]
        return self.conv.groups

    def output_shape(self, x_shape: Shape, w_shape: Shape) -> Shape:
        if len(x_shape) != self.conv.axes + 2 or len(w_shape) != len(x_shape) or x_shape[1] != w_shape[0]:
            raise OpError(
                f"conv_transpose: input {x_shape} and weight {w_shape}; needs (example, in, *spatial) and "
                "(in, out / groups, *kernel)."
            )
        if w_shape[0] % self.groups:
            raise OpError(f"conv_transpose: {w_shape[0]} input channels do not divide into {self.groups} groups.")
        sizes = tuple(
            (size - 1) * step - left - right + hole * (kernel - 1) + extra + 1
            for size, step, (left, right), hole, kernel, extra in zip(
                x_shape[2:],
                self.conv.stride,
                self.conv.padding.amounts,
                self.conv.dilation,
                w_shape[2:],
                self.output_padding,
                strict=True,
            )
        )
        if min(sizes) < 1:
            raise OpError(f"conv_transpose: padding {self.conv.padding.amounts} leaves nothing of the output.")
        return (x_shape[0], w_shape[1] * self.groups, *sizes)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.conv.grad_input(x, w, self.output_shape(tuple(x.shape), tuple(w.shape)))

    def grad_input(self, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        self.expect(delta, x_shape, tuple(w.shape))
        return self.conv.forward(delta, w)

    def grad_weight(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
        self.expect(delta, tuple(x.shape), w_shape)
        return self.conv.grad_weight(delta, x, w_shape)

    def flops(self, x_shape: Shape, w_shape: Shape) -> int:
        return 2 * prod(x_shape) // max(1, w_shape[0]) * prod(w_shape)

    def by_output(self, w: Tensor) -> Tensor:
        return self.conv.by_input(w)

    def by_input(self, w: Tensor) -> Tensor:
        return self.conv.by_output(w)

    def fan_in(self, w: Tensor, x_shape: Shape) -> float:
        return self.conv.fan_out(w, self.output_shape(x_shape, tuple(w.shape)))

    def fan_out(self, w: Tensor, x_shape: Shape) -> float:
        return self.conv.fan_in(w, x_shape)

    def positions(self, x_shape: Shape, y_shape: Shape) -> int:
        return prod(x_shape[2:])

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor

    @property
    def repeats_positions(self) -> bool:
        return self.conv.repeats_positions

    def row_shape(self, shape: Shape) -> Shape:
        return shape

    def channels(self, w_shape: Shape) -> tuple[int, int]:
        return w_shape[1] * self.groups, w_shape[0]

    def fold_channels(self, rows: Tensor, vectors: Tensor, groups: int) -> Tensor:
        return self.conv.fold_channels(rows, vectors, groups)

    def fold_weight_output(self, w: Tensor, u: Tensor) -> Tensor:
        return self.conv.fold_second(w, u)

    def fold_weight_input(self, w: Tensor, u: Tensor) -> Tensor:
        return self.conv.fold_first(w, u)

    def contract_folded(self, folded: Tensor, v: Tensor) -> Tensor:
        return self.conv.contract(folded, v)

    def project_forward(self, x: Tensor, w: Tensor, y_shape: Shape) -> Tensor:
        return self.conv.project_grad_input(x, w, y_shape)

    def project_grad_input(self, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        return self.conv.project_forward(delta, w, x_shape)

    def project_grad_weight(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
        return self.conv.project_grad_weight(delta, x, w_shape)

    def forward_positions(self, weights: Sequence[Tensor], x_shape: Shape, w_shape: Shape) -> list[Tensor]:
        return self.conv.grad_input_positions(weights, self.output_shape(x_shape, w_shape), w_shape)

    def grad_input_positions(self, weights: Sequence[Tensor], x_shape: Shape, w_shape: Shape) -> list[Tensor]:
        return self.conv.forward_positions(weights, self.output_shape(x_shape, w_shape), w_shape)

    def fold_taps(self, x: Tensor, delta: Tensor, slide: Slide) -> tuple[Tensor, Tensor]:
        delta, x = self.conv.fold_taps(delta, x, slide)
        return x, delta
