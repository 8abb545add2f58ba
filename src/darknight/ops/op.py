"""What an operation must offer to be outsourced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

from torch import Tensor

from darknight.errors import OpError
from darknight.types import OpSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sliding:
    """y[p] = sum over taps t of weight[t] * x[p * step + t * hole - skipped], along one axis of the positions.

    skipped: zeros before the first x, which are not there; nor are those behind the last.
    """

    axis: int
    step: int
    hole: int
    skipped: int
    count: int  # of positions of y


Slide = Callable[[Tensor, Sliding], Tensor]


@dataclass(frozen=True)
class Planes:
    """A convolution of planes with zeros around them, not in groups: down and across, steps between positions of y,
    between taps, and zeros before the first position of x.
    """

    steps: tuple[int, int] = (1, 1)
    holes: tuple[int, int] = (1, 1)
    zeros: tuple[int, int] = (0, 0)


class BilinearOp(ABC):
    """y = <w, x>: linear in x and linear in w, one example at a time along the first axis. No bias.

    Everything here is a linear or bilinear map written with ordinary float tensors. In float64 with integer values the
    same code is exact as long as no sum reaches 2^53; `ops.field` splits operands so that none does.

    Passes, in the names of the paper's Section on the backward pass:

        forward      y  = <w, x>
        grad_input   gx = <w, delta>^T
        grad_weight  gw = <delta, x>, summed over examples and positions

    Projections, for Freivalds' check. "row" stands for an example (Linear: for every vector along the last axis),
    "rep" for one of R independent repetitions. Both sides of each line are equal for all u, v:

        forward      sum_rows v sum_out u y    ==  project_forward(sum_rows v x, sum_out u w)
        grad_input   sum_rows v sum_in  u gx   ==  project_grad_input(sum_rows v delta, sum_in u w)
        grad_weight  sum_out u sum_in v gw     ==  project_grad_weight(sum_in v x, sum_out u delta)   (in each group)
        or           sum_out u gw              ==  project_grad_weight_inputs(x, sum_out u delta)

    Positions may be weighed too, with one vector s for each spatial axis (for grad_weight: a for each axis of the
    kernel). Then both sides are one number for each rep:

        forward      sum_positions s (left)  ==  <sum_out u w, sum_rows v x met by forward_positions(s)>
        grad_input   sum_positions s (left)  ==  <sum_in u w, sum_rows v delta met by grad_input_positions(s)>
        grad_weight  sum_taps a (left)       ==  <the two tensors of fold_taps(sum_in v x, sum_out u delta)>
    """

    name: ClassVar[str]
    groups: int
    output_axis: ClassVar[int] = 0  # of w; the input channels are the other one of the first two

    # --- on the wire ------------------------------------------------------------------------------------------------
    @abstractmethod
    def spec(self) -> OpSpec:
        """The op in words and whole numbers."""

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: OpSpec) -> Self:
        """The op that `spec` describes; raises OpError on anything unexpected."""

    # --- the three passes -------------------------------------------------------------------------------------------
    @abstractmethod
    def output_shape(self, x_shape: Shape, w_shape: Shape) -> Shape:
        """The shape of y; raises OpError when x and w do not fit."""

    def expect(self, delta: Tensor, x_shape: Shape, w_shape: Shape) -> None:
        """Raises OpError if `delta` is no gradient of y."""
        needed = self.output_shape(x_shape, w_shape)
        if tuple(delta.shape) != needed:
            raise OpError(
                f"{self.name}: gradient {tuple(delta.shape)} does not belong to input {x_shape}; needs {needed}."
            )

    @abstractmethod
    def forward(self, x: Tensor, w: Tensor) -> Tensor: ...

    @abstractmethod
    def grad_input(self, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor: ...

    @abstractmethod
    def grad_weight(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor: ...

    def output_blocks(self, w_shape: Shape) -> tuple[slice, ...]:
        """Output channels to compute at a time, so that a large w is never in memory as a whole in float64.

        Only an op whose channels are the last axis of x and y may have more than one block.
        """
        return (slice(None),)

    def input_blocks(self, w_shape: Shape) -> tuple[slice, ...]:
        """The same for input channels, of grad_input."""
        return (slice(None),)

    def flops(self, x_shape: Shape, w_shape: Shape) -> int:
        """Multiplications and additions of a forward pass."""
        y_shape = self.output_shape(x_shape, w_shape)
        return 2 * prod(y_shape) // max(1, self.channels(w_shape)[0]) * prod(w_shape)

    # --- how large a sum can grow -----------------------------------------------------------------------------------
    @abstractmethod
    def fan_in(self, w: Tensor, x_shape: Shape) -> float:
        """An upper bound of sum |w| over the products that make one element of y."""

    @abstractmethod
    def fan_out(self, w: Tensor, x_shape: Shape) -> float:
        """An upper bound of sum |w| over the products that make one element of gx."""

    def copies(self, x_shape: Shape) -> int:
        """How many elements of the padded input at most are copies of one element of x."""
        return 1

    def by_output(self, w: Tensor) -> Tensor:
        """The weights that one element of y meets, a row for each output channel of a group."""
        return w.flatten(1)

    def by_input(self, w: Tensor) -> Tensor:
        """The weights that one element of gx meets, a row for each input channel of a group."""
        return w.transpose(0, 1).flatten(1)

    @abstractmethod
    def positions(self, x_shape: Shape, y_shape: Shape) -> int:
        """An upper bound of the number of products of one example that make one element of gw."""

    # --- projections ------------------------------------------------------------------------------------------------
    @abstractmethod
    def rows(self, tensor: Tensor) -> Tensor:
        """x, y, delta or gx with one row along the first axis and channels along the second."""

    @abstractmethod
    def row_shape(self, shape: Shape) -> Shape:
        """The shape of `rows` of a tensor of this shape."""

    @abstractmethod
    def channels(self, w_shape: Shape) -> tuple[int, int]:
        """(output channels, input channels)."""

    @abstractmethod
    def fold_channels(self, rows: Tensor, vectors: Tensor, groups: int) -> Tensor:
        """(row, channel, ...) and (rep, channel) -> (row, group * rep, ...): sums over each group's channels."""

    @abstractmethod
    def fold_weight_output(self, w: Tensor, u: Tensor) -> Tensor:
        """w and u (rep, out) -> (rep, in, ...): sums over the output channels."""

    @abstractmethod
    def fold_weight_input(self, w: Tensor, u: Tensor) -> Tensor:
        """w and u (rep, in) -> (rep, out, ...): sums over the input channels."""

    @abstractmethod
    def contract_folded(self, folded: Tensor, v: Tensor) -> Tensor:
        """What fold_weight_output gave and v (rep, in) -> (group * rep, ...): sums over each group's inputs."""

    @abstractmethod
    def project_forward(self, x: Tensor, w: Tensor, y_shape: Shape) -> Tensor:
        """(rep, in, ...) and (rep, n, in, ...) -> (rep, n, ...): the op with n output channels, one example per rep."""

    @abstractmethod
    def project_grad_input(self, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        """(rep, out, ...) and (rep, n, out, ...) -> (rep, n, ...): the transposed op with n input channels."""

    @abstractmethod
    def project_grad_weight(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
        """(row, group * rep, ...) twice -> (group * rep, ...): one input and one output channel per group and rep."""

    def project_grad_weight_inputs(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
        """(row, in, ...) and (row, group * rep, ...) -> (rep, in, ...): with one output channel per group and rep."""
        inputs, kernel, reps = self.channels(w_shape)[1], w_shape[2:], delta.shape[1] // self.groups
        if self.output_axis:
            return self.grad_weight(x, delta, (inputs, reps, *kernel)).transpose(0, 1)
        found = self.grad_weight(x, delta, (self.groups * reps, inputs // self.groups, *kernel))
        return found.view(self.groups, reps, -1, *kernel).transpose(0, 1).reshape(reps, inputs, *kernel)

    @property
    def planes(self) -> Planes | None:
        """The op as a convolution of planes, of one position if `rows` has none; None if it is something else."""
        return None

    def is_pointwise(self, w_shape: Shape) -> bool:
        """Whether every position of y is made of the same position of x alone."""
        return False

    @property
    def repeats_positions(self) -> bool:
        """Whether a position of x may count several times at a tap, as at a border that repeats it."""
        return False

    def trimmed(self, x: Tensor, w_shape: Shape) -> tuple[BilinearOp, Tensor]:
        """x without positions that no tap meets, and the op that does the same with the rest."""
        return self, x

    def forward_positions(self, weights: Sequence[Tensor], x_shape: Shape, w_shape: Shape) -> list[Tensor]:
        """For each axis (rep, size of y) -> (rep, taps, size of x): what a position of x counts at a tap."""
        return []

    def grad_input_positions(self, weights: Sequence[Tensor], x_shape: Shape, w_shape: Shape) -> list[Tensor]:
        """For each axis (rep, size of x) -> (rep, taps, size of y): what a position of delta counts at a tap."""
        return []

    def fold_taps(self, x: Tensor, delta: Tensor, slide: Slide) -> tuple[Tensor, Tensor]:
        """Two tensors (row, group * rep, ...) whose inner product is that of delta and x, taps weighed and summed.

        x, delta: integers. slide: weighs and sums along an axis.
        """
        return x, delta


def in_blocks(blocks: Sequence[slice], axis: int, shape: Shape, part: Callable[[slice], Tensor]) -> Tensor:
    """part(block) of all blocks, put together along `axis` to a result of this shape."""
    first = part(blocks[0])
    if len(blocks) == 1:
        return first
    out = first.new_empty(shape)
    along = out.movedim(axis, 0)
    along[blocks[0]] = first.movedim(axis, 0)
    for block in blocks[1:]:
        along[block] = part(block).movedim(axis, 0)
    return out


def collapse_rows(folded: Tensor, vectors: Tensor) -> Tensor:
    """(row, rep, ...) and (rep, row) -> (rep, ...): each rep with its own weights."""
    if folded.dim() == 2:
        return (folded * vectors.t()).sum(0)
    total = folded.new_zeros(folded.shape[1:])
    for row, weights in zip(folded, vectors.t(), strict=True):  # one by one: the sum stays in cache
        total.addcmul_(row, weights.view(-1, *[1] * (folded.dim() - 2)))
    return total


def settings_of(spec: OpSpec, numbers: Sequence[str], words: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """The numeric settings by name, when the spec has exactly these numbers and words."""
    found = dict(spec.settings)
    if len(found) != len(spec.settings) or found.keys() != {*numbers, *words}:
        raise OpError(f"op {spec.name}: settings {sorted(found)}; needs {sorted({*numbers, *words})}.")
    result = {}
    for name in numbers:
        value = found[name]
        if isinstance(value, str) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise OpError(f"op {spec.name}: setting {name} needs whole numbers.")
        result[name] = value
    return result
