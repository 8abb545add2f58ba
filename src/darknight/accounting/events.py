"""What happened in a layer call, as frozen events. The runtime emits them, the ledger adds them up."""

from __future__ import annotations

from dataclasses import dataclass

from darknight.types import Pass


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A batch was masked and sent: `features` numbers of each example, at most `nats` each to a tolerated coalition."""

    layer: str
    what: str  # "input" or "gradient"
    examples: int
    features: int
    nats: float


@dataclass(frozen=True, kw_only=True)
class SentClear:
    """A batch of gradients went to workers unmasked."""

    layer: str
    examples: int


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A result passed a check ("freivalds" or "parity"), or came back unchecked ("off")."""

    layer: str
    kind: Pass
    check: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A result did not pass a check, and was not used."""

    layer: str
    kind: Pass
    check: str


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """A result left the field's range and was computed again at a smaller scale. Workers can see that it was."""

    layer: str
    kind: Pass


@dataclass(frozen=True, kw_only=True)
class BoundRaised:
    """Values exceeded the layer's bound, which grew from this call on. The new bound shows in the noise."""

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
    """Seconds of one layer call: all of it, waiting for workers, and what workers say they computed, together."""

    total: float
    waiting: float
    workers: float


Event = Masked | SentClear | Verified | Failed | Overflow | BoundRaised | Traffic | Spent
