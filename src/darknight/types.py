"""Records and names that more than one room uses. The wire carries these records and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn

import torch
from torch import Tensor


class Pass(Enum):
    """The three bilinear passes of a layer."""

    FORWARD = "forward"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"

    __hash__ = object.__hash__  # each is one object; Enum's own hash is Python, and passes are keys everywhere


class Secret:
    """A value that must not wander: it hides its content from repr, and refuses pickle, copies and ==."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: hidden>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is secret and cannot be pickled or copied.")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is secret and cannot be compared.")

    __hash__ = object.__hash__


# --- from the enclave to a worker -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class OpSpec:
    """An op in words and whole numbers: a name of the ops registry, and its settings."""

    name: str
    settings: tuple[tuple[str, str | tuple[int, ...]], ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Weights:
    """A layer's public weights. The worker keeps them, by layer and version, until it is told to forget them.

    prime: the field of the integers in `tensor`, or None for real arithmetic.
    """

    layer: str
    version: int
    op: OpSpec
    prime: int | None
    tensor: Tensor


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Seed(Secret):
    """A share that is noise and nothing else, as the key that it follows from: residues in [0, prime).

    They are the AES-256-CTR keystream under `key`, from counter 0 on, in words of 32 bits, cut to the bits of
    prime - 1; those that are still too large are drawn again, in their order, from what follows.
    """

    key: bytes
    prime: int


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardTask:
    """A share of a layer's input: answer with <W, share> if `compute`, and keep the share for the backward pass.

    seed: what is sent in the place of the share. A worker then finds the share's form in `tensor`, without memory.
    """

    layer: str
    call: int
    version: int
    tensor: Tensor
    compute: bool
    keep: bool
    seed: Seed | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class BackwardTask:
    """A share of the gradient of a layer's output, to be met with the input share that was kept under `call`.

    With gradients in the clear `tensor` holds all inputs' gradients (group, input, *feature), and `row` the worker's
    coefficients: it combines them itself. Otherwise `row` is None. seed: as in a forward task.
    """

    layer: str
    call: int
    version: int
    tensor: Tensor
    passes: tuple[Pass, ...]
    x_shape: tuple[int, ...]
    row: tuple[float, ...] | None = None
    seed: Seed | None = None


@dataclass(frozen=True, kw_only=True)
class Forget:
    """Calls and weights (layer, version) that are not needed any more, or everything."""

    calls: tuple[int, ...] = ()
    weights: tuple[tuple[str, int], ...] = ()
    everything: bool = False


@dataclass(frozen=True, kw_only=True)
class TooLarge:
    """What a worker's reader makes of a message whose tensor it has no room for: the tensor was not kept.

    version: of the weights that did not fit; None for a task.
    """

    layer: str
    version: int | None
    reason: str


Task = ForwardTask | BackwardTask
Message = Weights | Task | Forget


# --- and back -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """The results of a task, a tensor for each pass that was asked for; `seconds` of computing, as the worker says.

    release: to be called when nobody reads the tensors any more, if the answer was `Expected.lent`.
    """

    layer: str
    call: int
    tensors: Mapping[Pass, Tensor]
    seconds: float
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a worker could not do a task."""

    message: str


Reply = Answer | Refusal


@dataclass(frozen=True)
class Expected:
    """What an answer must look like: the enclave fixes shapes, dtype and range; a worker chooses none of them.

    prime: answers are residues in [0, prime); None for floats. lent: who asks takes the answer where it lies, perhaps
    in memory that its worker can still write to, and checks its range: it reads each tensor once, checks what it read,
    and then releases the answer.
    """

    shapes: Mapping[Pass, tuple[int, ...]]
    dtype: torch.dtype
    prime: int | None
    lent: bool = False


# --- what a worker saw ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Record:
    """One tensor that a worker received or sent, as it was on the wire.

    kind: "weights", "forward.share", "forward.reply", "backward.share", "grad_input.reply" or "grad_weight.reply".
    call: the layer call it belongs to; the version for weights. detail: everything else that came with it.
    """

    layer: str
    kind: str
    call: int
    tensor: Tensor
    detail: Mapping[str, object] = field(default_factory=dict)
