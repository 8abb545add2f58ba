"""The layers that every promise about bilinear ops is tested on, each with PyTorch's own module as its reference.

All shapes are non-square and all channel numbers differ, so that a swapped axis cannot pass unnoticed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from darknight.ops import BilinearOp, Conv, ConvTranspose, Linear
from darknight.types import Pass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One op with shapes; `module` makes the torch.nn layer with the same arguments, in float64 and without bias."""

    label: str
    op: BilinearOp = field(compare=False)
    module: Callable[[], nn.Module] = field(compare=False)
    x_shape: Shape

    @cached_property
    def w_shape(self) -> Shape:
        return tuple(self.module().weight.shape)

    @cached_property
    def y_shape(self) -> Shape:
        """As torch has it."""
        return tuple(self.module()(torch.zeros(self.x_shape, dtype=torch.float64)).shape)

    @property
    def rows(self) -> int:
        """Linear counts every vector along the last axis as a row, the convolutions every example."""
        return int(np.prod(self.x_shape[:-1])) if self.op.name == "linear" else self.x_shape[0]

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(crc32(f"{self.label}/{seed}".encode()))

    def integers(self, bits: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """x, w and delta in float64, integers of magnitude up to 2^bits."""
        return tuple(
            integers(shape, bits, self.generator(seed)) for shape in (self.x_shape, self.w_shape, self.y_shape)
        )

    def run(self, kind: Pass, x: Tensor, w: Tensor, delta: Tensor) -> Tensor:
        """The pass by the op under test; each pass ignores one of the three operands."""
        if kind is Pass.FORWARD:
            return self.op.forward(x, w)
        if kind is Pass.GRAD_INPUT:
            return self.op.grad_input(delta, w, tuple(x.shape))
        return self.op.grad_weight(x, delta, tuple(w.shape))


def integers(shape: Shape, bits: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**bits), 2**bits + 1, shape, generator=generator).to(torch.float64)


# --- constructors ---------------------------------------------------------------------------------------------------
_CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def linear(label: str, x_shape: Shape, out: int) -> Case:
    def module() -> nn.Module:
        return nn.Linear(x_shape[-1], out, bias=False, dtype=torch.float64)

    return Case(f"linear {label}", Linear(), module, x_shape)


def conv(label: str, x_shape: Shape, out: int, kernel: Shape, **arguments) -> Case:
    def module() -> nn.Module:
        return _CONVS[len(kernel)](x_shape[1], out, kernel, bias=False, dtype=torch.float64, **arguments)

    return Case(f"conv{len(kernel)}d {label}", Conv.make(kernel, **arguments), module, x_shape)


def transposed(label: str, x_shape: Shape, out: int, kernel: Shape, **arguments) -> Case:
    def module() -> nn.Module:
        return _TRANSPOSED[len(kernel)](x_shape[1], out, kernel, bias=False, dtype=torch.float64, **arguments)

    return Case(f"conv_transpose{len(kernel)}d {label}", ConvTranspose.make(kernel, **arguments), module, x_shape)


CASES = [
    linear("2-d input", (5, 7), 3),
    linear("3-d input", (3, 2, 5), 4),
    linear("4-d input", (2, 3, 2, 4), 3),
    linear("one output", (4, 6), 1),
    conv("plain", (3, 2, 9), 4, (3,)),
    conv("stride, padding, dilation", (3, 2, 11), 3, (3,), stride=2, padding=2, dilation=2),
    conv("stride that leaves a rest uncovered", (2, 2, 9), 3, (2,), stride=4),
    conv("same, even kernel", (2, 3, 7), 2, (4,), padding="same"),
    conv("same, even kernel, dilation", (2, 2, 9), 3, (4,), padding="same", dilation=3),
    conv("circular", (2, 3, 6), 2, (3,), padding=2, padding_mode="circular"),
    conv("reflect", (2, 2, 6), 3, (4,), padding=3, padding_mode="reflect"),
    conv("replicate, groups", (2, 4, 5), 6, (3,), padding=2, padding_mode="replicate", groups=2),
    conv("plain", (3, 2, 5, 6), 4, (3, 2)),
    conv("1x1", (3, 4, 2, 3), 5, (1, 1)),
    conv("one input and one output channel", (2, 1, 5, 4), 1, (2, 3)),
    conv("stride", (2, 3, 7, 6), 2, (3, 2), stride=(2, 3)),
    conv("stride and padding", (2, 2, 7, 6), 3, (3, 4), stride=(3, 2), padding=(1, 2)),
    conv("dilation", (2, 2, 8, 7), 3, (3, 2), dilation=(2, 3), padding=(0, 1)),
    conv("valid", (2, 2, 5, 6), 3, (2, 3), padding="valid"),
    conv("same, odd kernel", (2, 2, 5, 4), 3, (3, 5), padding="same"),
    conv("same, even kernel", (2, 2, 5, 4), 3, (2, 4), padding="same"),
    conv("same, even kernel, dilation", (2, 2, 6, 7), 3, (2, 4), padding="same", dilation=(3, 1)),
    conv("same, even kernel, circular", (2, 2, 5, 4), 3, (2, 4), padding="same", padding_mode="circular"),
    conv("reflect", (2, 2, 5, 4), 3, (3, 2), padding=(2, 1), padding_mode="reflect"),
    conv("replicate", (2, 2, 4, 3), 3, (2, 3), padding=(3, 1), padding_mode="replicate", stride=(1, 2)),
    conv("circular", (2, 2, 4, 5), 3, (3, 2), padding=(2, 1), padding_mode="circular"),
    conv("groups, out > in", (2, 4, 5, 4), 6, (2, 3), groups=2),
    conv("groups, out < in", (2, 6, 4, 5), 3, (3, 2), groups=3, padding=1, stride=(1, 2)),
    conv("depthwise", (2, 3, 5, 4), 3, (3, 2), groups=3, padding=(1, 0)),
    conv("depthwise with multiplier", (2, 3, 4, 5), 6, (2, 3), groups=3),
    conv("groups, same, dilation", (2, 4, 6, 5), 6, (2, 3), groups=2, padding="same", dilation=(3, 1)),
    conv("stride, padding, dilation", (2, 2, 5, 4, 6), 3, (2, 1, 3), stride=(2, 1, 1), padding=(1, 0, 2), dilation=2),
    conv("same, even kernel", (1, 2, 3, 4, 2), 3, (2, 3, 1), padding="same"),
    conv("reflect, groups", (2, 4, 3, 4, 3), 2, (2, 3, 2), groups=2, padding=(1, 2, 1), padding_mode="reflect"),
    conv("replicate", (2, 2, 3, 2, 4), 3, (2, 2, 3), padding=(0, 1, 2), padding_mode="replicate"),
    conv("circular", (2, 2, 3, 2, 4), 3, (2, 1, 3), padding=(1, 0, 2), padding_mode="circular"),
    transposed("plain", (3, 2, 5), 4, (3,)),
    transposed("everything", (2, 4, 5), 6, (3,), stride=3, padding=1, output_padding=2, dilation=2, groups=2),
    transposed("plain", (2, 3, 3, 4), 2, (2, 3)),
    transposed("stride and output padding", (2, 2, 3, 4), 3, (3, 2), stride=(2, 3), output_padding=(1, 2)),
    transposed("padding and dilation", (2, 2, 4, 3), 3, (2, 3), padding=(1, 2), dilation=(3, 2)),
    transposed("groups, out > in", (2, 4, 3, 2), 6, (2, 3), groups=2, stride=(1, 2)),
    transposed("groups, out < in", (2, 6, 3, 4), 3, (3, 2), groups=3, stride=2, padding=1, output_padding=(0, 1)),
    transposed("depthwise", (2, 3, 4, 3), 3, (2, 3), groups=3, padding=(0, 1)),
    transposed("plain", (1, 2, 2, 3, 4), 3, (2, 3, 1)),
    transposed(
        "everything",
        (2, 4, 2, 3, 2),
        2,
        (2, 1, 3),
        stride=(2, 1, 3),
        padding=(1, 0, 1),
        output_padding=(1, 0, 2),
        dilation=(1, 2, 2),
        groups=2,
    ),
]


# --- the slow and obviously right arithmetic ------------------------------------------------------------------------
@dataclass(frozen=True)
class Table:
    """Every product of one example: y[out] += x[source] * w[tap], with flat indices. Coefficients are all one."""

    out: np.ndarray
    source: np.ndarray
    tap: np.ndarray


@cache
def table(case: Case) -> Table:
    """The bilinear map written out, by showing torch's module each pair of unit vectors."""
    module = case.module()
    example = case.x_shape[1:]
    units = torch.eye(int(np.prod(example)), dtype=torch.float64).view(-1, *example)
    found = []
    for tap in range(module.weight.numel()):
        with torch.no_grad():
            module.weight.zero_().view(-1)[tap] = 1.0
            products = module(units).flatten(1)  # (source, out)
        assert set(products.unique().tolist()) <= {0.0, 1.0}
        source, out = products.nonzero(as_tuple=True)
        found.append(np.stack([out.numpy(), source.numpy(), np.full(len(out), tap)]))
    return Table(*np.concatenate(found, axis=1))


def exactly(case: Case, kind: Pass, x: Tensor, w: Tensor, delta: Tensor) -> np.ndarray:
    """The pass in Python integers of any size, in the result's shape."""
    products = table(case)
    sources, weights, deltas = (python_integers(tensor) for tensor in (x, w, delta))
    sources, deltas = sources.reshape(len(x), -1), deltas.reshape(len(delta), -1)
    if kind is Pass.GRAD_WEIGHT:
        total = np.zeros(w.numel(), dtype=object)
        for source, gradient in zip(sources, deltas, strict=True):
            np.add.at(total, products.tap, source[products.source] * gradient[products.out])
        return total.reshape(tuple(w.shape))
    forward = kind is Pass.FORWARD
    shape = delta.shape if forward else x.shape
    into, rows, index = (products.out, sources, products.source) if forward else (products.source, deltas, products.out)
    total = np.zeros((shape[0], int(np.prod(shape[1:]))), dtype=object)
    factors = weights.reshape(-1)[products.tap]
    for example, row in enumerate(rows):
        np.add.at(total[example], into, row[index] * factors)
    return total.reshape(tuple(shape))


def python_integers(tensor: Tensor) -> np.ndarray:
    flat = np.array([int(value) for value in tensor.flatten().tolist()], dtype=object)
    return flat.reshape(tuple(tensor.shape))
