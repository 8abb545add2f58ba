"""What happened in a layer call, as frozen events. The runtime emits them, the ledger adds them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from darknight.types import Pass


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A batch was masked, to be sent: `features` numbers of each example, at most `nats` each to a tolerated coalition.

    groups: virtual batches; the bound is about all examples of one together. by_coalition: `nats` for each coalition of
    seats; empty where all are zero. paper: what the paper's theorem says instead.
    """

    layer: str
    what: str  # "input" or "gradient"
    examples: int
    groups: int
    features: int
    nats: float
    by_coalition: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    paper: float = 0.0

    @property
    def nats_per_example(self) -> float:
        """About one example, which is in one of the virtual batches."""
        return self.features * self.nats


@dataclass(frozen=True, kw_only=True)
class SentClear:
    """A batch of gradients went to workers unmasked."""

    layer: str
    examples: int


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A result passed a check: "freivalds" or "parity"."""

    layer: str
    kind: Pass
    check: str


@dataclass(frozen=True, kw_only=True)
class Unchecked:
    """A result was used that nothing checked, because the scheme says so."""

    layer: str
    kind: Pass


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A result did not pass a check, and was not used."""

    layer: str
    kind: Pass
    check: str


@dataclass(frozen=True, kw_only=True)
class Blamed:
    """A worker gave an answer that does not fit its own share, and is out. The evidence; no values of data.

    check: what noticed: "freivalds", "parity", "range" for values that no honest worker can have computed, or "form"
    for what is no answer to the question; `kind` is then the first pass that the worker was asked for.
    finding: in words, what was wrong.
    """

    layer: str
    call: int
    kind: Pass
    check: str
    worker: str
    seat: int
    finding: str


@dataclass(frozen=True, kw_only=True)
class Unexplained:
    """A check failed, though each answer fits its own share.

    In real arithmetic, as far as rounding tells; the enclave did the pass. In the field, a worker changed its answer
    after it was decoded; the answers as they were then were decoded, and from that moment on answers are copied first.
    """

    layer: str
    call: int
    kind: Pass
    check: str


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """A result left the field's range and was computed again at a smaller scale. Workers can see that it was."""

    layer: str
    kind: Pass


@dataclass(frozen=True, kw_only=True)
class BoundRaised:
    """The layer's bound was set by its first values, or grew with larger ones. It shows in the noise."""

    layer: str
    what: str
    bound: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of tensors to and from all workers."""

    sent: int
    received: int


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Wall seconds of one layer call: all of it, and of that until workers had answered; and what workers say that they
    computed, added up."""

    total: float
    waiting: float
    workers: float


@dataclass(frozen=True, kw_only=True)
class Missed:
    """A worker gave no usable answer in this call. Its part was done by others, or again."""

    layer: str
    worker: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Reseated:
    """A seat of the scheme changed hands: to `worker`, or to nobody, and then the enclave does its part."""

    seat: int
    worker: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Resent:
    """A share went, unchanged, to another worker, whose operator holds no other share of that masking."""

    layer: str
    seat: int
    worker: str


@dataclass(frozen=True, kw_only=True)
class DoneInEnclave:
    """The enclave did the part of a worker that was missing."""

    layer: str
    kind: Pass
    seat: int


Event = (
    Masked
    | SentClear
    | Verified
    | Unchecked
    | Failed
    | Blamed
    | Unexplained
    | Overflow
    | BoundRaised
    | Traffic
    | Spent
    | Missed
    | Reseated
    | Resent
    | DoneInEnclave
)
