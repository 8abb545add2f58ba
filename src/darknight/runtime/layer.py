"""What the runtime remembers: about a layer from call to call, and about a call until its backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from darknight.coding import Code
from darknight.coding.real import Grid
from darknight.errors import UsageError
from darknight.ops import BilinearOp
from darknight.runtime.sizes import Sizes
from darknight.types import Weights

LayerState = Mapping[str, float | int | None]


@dataclass(eq=False)
class SentWeights:
    """One version of a layer's weights, as workers have them: integers times 2^-exponent, or floats.

    given: by worker, the epoch in which it was sent them.
    """

    layer: str
    version: int
    op: BilinearOp
    tensor: Tensor
    exponent: int
    message: Weights | None = field(default=None, repr=False)  # the one object that is posted to every worker
    sizes: tuple[Sizes, Sizes] | None = None  # of what an element of y meets, and of gx (Field, where scales need it)
    given: dict[int, int] = field(default_factory=dict, repr=False)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True, eq=False)
class NewWeights:
    """Weights before they have a version. earlier: those before, in less memory where that is possible."""

    tensor: Tensor
    exponent: int
    sizes: tuple[Sizes, Sizes] | None = None
    earlier: Tensor | None = None


@dataclass(eq=False)
class Layer:
    """A protected layer. `name` is its key on the wire; `label` what messages call it.

    gradients counts its backward passes: the index of the rounding, so that repeating or recomputing a forward pass
    does not shift it. earlier: the weights before the present ones, to recognise a worker that computes with them.
    input_bound and gradient_bound are C1 of Real arithmetic; None until first seen, unless the
    input's was declared. input_exponent and gradient_exponent: of the bits that the last ones filled; they are tried
    first, and decide nothing. home: it is computed in the enclave, in floats, because that is cheaper. free: nobody
    asked for its place, so a state that is loaded decides. moved: called when it did.
    """

    name: str
    label: str
    declared: bool = False
    input_bound: float | None = None
    gradient_bound: float | None = None
    input_exponent: int | None = None
    gradient_exponent: int | None = None
    gradients: int = 0
    home: bool = False
    free: bool = False
    moved: Callable[[bool], None] | None = field(default=None, repr=False)
    weights: SentWeights | None = field(default=None, repr=False)
    earlier: Tensor | None = field(default=None, repr=False)

    def state(self) -> LayerState:
        """What a checkpoint keeps of it. States of before layers had a place are of layers that were sent."""
        place = {"home": True} if self.home else {}
        return {
            "gradients": self.gradients,
            "input_bound": self.input_bound,
            "gradient_bound": self.gradient_bound,
            **place,
        }

    def check_place(self, state: LayerState) -> None:
        """Refuse a state of the other place, if somebody asked for this one."""
        if not self.free and state.get("home", False) != self.home:
            raise UsageError(
                f"the state is of a run in which layer {self.label} was computed in the enclave; here it was asked to "
                "be masked. Let `where` be None for it, as it was then, or start anew."
            )

    def restore(self, state: LayerState) -> None:
        self.gradients = int(state["gradients"] or 0)
        self.input_bound, self.gradient_bound = state["input_bound"], state["gradient_bound"]
        home = bool(state.get("home", False))
        if home != self.home:
            self.home = home
            if self.moved is not None:
                self.moved(home)


def check_state(name: str, state: LayerState) -> None:
    count, bounds = state.get("gradients"), (state.get("input_bound", 0), state.get("gradient_bound", 0))
    fitting = [bound is None or (isinstance(bound, int | float) and 0 < bound < math.inf) for bound in bounds]
    if not isinstance(count, int) or count < 0 or not all(fitting) or not isinstance(state.get("home", False), bool):
        raise UsageError(f"the state of layer {name} is damaged. Load one that state_dict() gave.")


@dataclass(eq=False)
class Saved:
    """A forward call whose backward pass may come. While it lives, workers keep its shares.

    code: the coefficients of this call. exponent, largest magnitude, checksum and sizes: of the input, which is
    quantised again for the backward pass (Field). values and grid: the input as it was encoded, kept because
    recomputing it would give other values (Real). stream: of the noise, to make a lost share again. holders: by seat,
    the worker that keeps the share, and its epoch. parts: the calls of its chunks, in order, where the batch went in
    several (`runtime.chunks`): then workers keep shares of these alone.
    """

    call: int
    x_shape: tuple[int, ...]
    weights: SentWeights
    code: Code | None = field(default=None, repr=False)
    exponent: int = 0
    largest: float = 0.0
    values: Tensor | None = field(default=None, repr=False)
    grid: Grid | None = None
    checksum: int = 0
    sizes: Sizes | None = None
    stream: int = 0
    holders: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)
    parts: tuple[Saved, ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls,
        x_shape: tuple[int, ...],
        weights: SentWeights,
        code: Code,
        cuts: Sequence[slice],
        open_call: Callable[[], int],
    ) -> Saved:
        """Of a batch that goes in these chunks."""
        made = [
            cls(call=open_call(), x_shape=(cut.stop - cut.start, *x_shape[1:]), weights=weights, code=code)
            for cut in cuts
        ]
        if len(made) == 1:
            return made[0]
        return cls(call=made[0].call, x_shape=x_shape, weights=weights, code=code, parts=tuple(made))

    @property
    def cuts(self) -> list[slice]:
        """The examples of each part."""
        ends = list(accumulate(part.x_shape[0] for part in self.parts))
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
