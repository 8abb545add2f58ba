"""Linear layers on any leading dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor

from darknight.errors import OpError
from darknight.ops.op import BilinearOp, Planes, Shape, settings_of
from darknight.types import OpSpec

BLOCK = 1 << 19  # weights multiplied at a time: their digits and partial results stay in the cache, 2 to 4 times faster


@dataclass(frozen=True)
class Linear(BilinearOp):
    """y = x w^T along the last axis; x (example, ..., in), w (out, in)."""

    name: ClassVar[str] = "linear"
    groups: ClassVar[int] = 1  # type: ignore[misc]

    def spec(self) -> OpSpec:
        return OpSpec(self.name)

    @classmethod
    def from_spec(cls, spec: OpSpec) -> Self:
        settings_of(spec, ())
        return cls()

    def output_shape(self, x_shape: Shape, w_shape: Shape) -> Shape:
        if len(w_shape) != 2 or len(x_shape) < 2 or x_shape[-1] != w_shape[1]:
            raise OpError(f"linear: input {x_shape} and weight {w_shape}; needs (example, ..., in) and (out, in).")
        return (*x_shape[:-1], w_shape[0])

    def output_blocks(self, w_shape: Shape) -> tuple[slice, ...]:
        return _blocks(w_shape, 0)

    def input_blocks(self, w_shape: Shape) -> tuple[slice, ...]:
        return _blocks(w_shape, 1)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        self.output_shape(tuple(x.shape), tuple(w.shape))
        return x @ w.t()

    def grad_input(self, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        self.expect(delta, x_shape, tuple(w.shape))
        return delta @ w

    def grad_weight(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
        self.expect(delta, tuple(x.shape), w_shape)
        return self.rows(delta).t() @ self.rows(x)

    def fan_in(self, w: Tensor, x_shape: Shape) -> float:
        return float(w.abs().sum(1).max())

    def fan_out(self, w: Tensor, x_shape: Shape) -> float:
        return float(w.abs().sum(0).max())

    def positions(self, x_shape: Shape, y_shape: Shape) -> int:
        return prod(x_shape[1:-1])

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1])

    def row_shape(self, shape: Shape) -> Shape:
        return prod(shape[:-1]), shape[-1]

    def channels(self, w_shape: Shape) -> tuple[int, int]:
        return w_shape[0], w_shape[1]

    @property
    def planes(self) -> Planes:
        return Planes()

    def fold_channels(self, rows: Tensor, vectors: Tensor, groups: int) -> Tensor:
        if groups == 1:
            return rows @ vectors.t()
        parts = zip(rows.chunk(groups, dim=1), vectors.chunk(groups, dim=1), strict=True)
        return torch.cat([part @ weights.t() for part, weights in parts], dim=1)

    def fold_weight_output(self, w: Tensor, u: Tensor) -> Tensor:
        return u @ w

    def fold_weight_input(self, w: Tensor, u: Tensor) -> Tensor:
        return u @ w.t()

    def contract_folded(self, folded: Tensor, v: Tensor) -> Tensor:
        return (folded * v).sum(1)

    def project_forward(self, x: Tensor, w: Tensor, y_shape: Shape) -> Tensor:
        return torch.bmm(w, x.unsqueeze(2)).squeeze(2)

    def project_grad_input(self, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        return torch.bmm(w, delta.unsqueeze(2)).squeeze(2)

    def project_grad_weight(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
        return torch.einsum("nr,nr->r", x, delta)


def _blocks(w_shape: Shape, axis: int) -> tuple[slice, ...]:
    if prod(w_shape) <= BLOCK:  # also what is no matrix, which the passes refuse
        return (slice(None),)
    channels = w_shape[axis]
    step = max(1, BLOCK * channels // prod(w_shape))
    return tuple(slice(begin, begin + step) for begin in range(0, channels, step))
