"""What a plan is asked for: the work, the fleet, the target, and what things cost."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from darknight.errors import UsageError
from darknight.ops.cost import Rates
from darknight.ops.place import COST, STRUCTURE, check_place

ARITHMETICS = ("auto", "field", "real")
INTEGRITIES = ("freivalds", "parity", "both")
_MOST_UNRELIABLE = 0.5  # of all answers: with more, most passes fail
_MOST_SPARES = 8  # that are compared
_MOST = 10**15  # of examples and epochs: beyond it, counts of bytes leave what a table can show


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """How fast things are. The defaults are those of one core of one server; docs/howto/plan.md says how measured.

    worker_gflops: float64 products of one worker, in 10^9 operations a second. link_gbits: of the line to one worker,
    in 10^9 bits a second, encryption included. masking_gbytes: of shares that the enclave makes, and of answers that
    it unmasks and checks, in 10^9 bytes a second. memory_gbytes: that torch's own operations read and write in the
    enclave. pass_ms: what a pass takes in any case, in milliseconds: the enclave's own code, and the round trip.
    notice_ms: until it is known that an answer will not come: nothing if a link breaks, a second or more if a worker
    hangs. enclave_gflops: float32 products in the enclave, which does none but for workers that are missing; and to
    compare with a training in the enclave alone.
    """

    worker_gflops: float = 26.0
    link_gbits: float = 2.6
    masking_gbytes: float = 0.3
    memory_gbytes: float = 8.9
    pass_ms: float = 4.0
    notice_ms: float = 0.0
    enclave_gflops: float = 80.0

    def __post_init__(self) -> None:
        for name in ("worker_gflops", "link_gbits", "masking_gbytes", "memory_gbytes", "enclave_gflops"):
            _check_number(name, getattr(self, name), zero=False)
        for name in ("pass_ms", "notice_ms"):
            _check_number(name, getattr(self, name), zero=True)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """For an hour of the enclave, and of one worker, in any currency."""

    enclave: float = 0.0
    worker: float = 0.0

    def __post_init__(self) -> None:
        _check_number("enclave_price", self.enclave, zero=True)
        _check_number("worker_price", self.worker, zero=True)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that decides a plan.

    model, shape, classes: as in darknight.models. training: or inference, where every example is sent once. operators:
    who runs each of the workers. colluders (M), spares (E; None: as many as pay), max_inputs (K, at most). arithmetic:
    "field", "real", or "auto": whichever is cheaper within the target, and the field if there is none. leakage_target:
    nats about one example over the whole run, at most; None for as few as possible, which is none. unreliable: how many
    of all answers are missing, as a share of 1; the default is a guess, not a measurement. place: where products are
    computed (ops.place); by cost, at the enclave's `rates`. local: workers are on the enclave's machine and share
    memory with it, so that nothing need be sealed; it matters to places by cost alone.
    """

    model: str
    shape: tuple[int, int, int]
    classes: int
    batch_size: int
    examples: int
    operators: tuple[str, ...]
    epochs: int = 1
    training: bool = True
    colluders: int = 1
    spares: int | None = None
    max_inputs: int | None = None
    arithmetic: str = "auto"
    integrity: str = "freivalds"
    leakage_target: float | None = None
    unreliable: float = 0.001
    prices: Prices | None = None
    speeds: Speeds = field(default_factory=Speeds)
    place: str = STRUCTURE
    rates: Rates | None = None
    local: bool = False

    def __post_init__(self) -> None:
        check_place(self.place)
        if (self.place == COST) != (self.rates is not None):
            raise UsageError("a place by cost needs rates of the enclave, and no other place does.")
        for name, least in (("batch_size", 1), ("examples", 1), ("epochs", 1), ("colluders", 1)):
            _check_whole(name, getattr(self, name), least)
        for name, least in (("spares", 0), ("max_inputs", 1)):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), least)
        if not self.operators:
            raise UsageError("no workers. Say how many there are, or name a fleet file.")
        if self.arithmetic not in ARITHMETICS:
            raise UsageError(f"arithmetic {self.arithmetic!r}; use one of {', '.join(ARITHMETICS)}.")
        if self.integrity not in INTEGRITIES:
            raise UsageError(f"integrity {self.integrity!r}; use one of {', '.join(INTEGRITIES)}.")
        _check_number("unreliable", self.unreliable, zero=True)
        if self.unreliable > _MOST_UNRELIABLE:
            raise UsageError(f"unreliable {self.unreliable}; needs a share of 1, at most {_MOST_UNRELIABLE}.")
        if not self.training and self.epochs != 1:
            raise UsageError(f"epochs {self.epochs} of an inference, which sees every example once. Drop it.")
        if self.leakage_target is not None:
            _check_number("leakage_target", self.leakage_target, zero=True)
        elif self.arithmetic == "real":
            raise UsageError(
                "real arithmetic without a leakage target: the noise follows from it. Give one in nats, or use field."
            )

    @property
    def least_workers(self) -> int:
        """What a single input needs: 1 + 2M + E, or 1 + M + E for inference."""
        return 1 + (2 if self.training else 1) * self.colluders + self.least_spares

    @property
    def parity(self) -> bool:
        return self.integrity in ("parity", "both")

    @property
    def needed_spares(self) -> int:
        """Parity needs an answer more than decoding does. In training there are such anyway, by those who idle."""
        return 1 if self.parity and not self.training else 0

    @property
    def least_spares(self) -> int:
        return self.needed_spares if self.spares is None else self.spares

    @property
    def spares_to_compare(self) -> range:
        """Where answers are never missing, or parity wants all of them, spares save nothing: the fewest are best."""
        free = self.spares is None and self.unreliable and not self.parity
        return range(self.least_spares, (_MOST_SPARES if free else self.least_spares) + 1)

    @property
    def usable_workers(self) -> int:
        """One operator holds at most `colluders` shares of a masking, so more of its workers are of no use."""
        return sum(min(self.colluders, count) for count in Counter(self.operators).values())

    def batches(self, epochs: int = 1) -> dict[int, int]:
        """How often a batch of each size occurs: the last one of an epoch may be smaller."""
        full, rest = divmod(self.examples, self.batch_size)
        found = {self.batch_size: full * epochs, rest: epochs}
        return {size: count for size, count in found.items() if size and count}


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise UsageError(f"{_words(name)} {value}; needs a whole number from {least} to {_MOST:.0e}.")


def _check_number(name: str, value: float, *, zero: bool) -> None:
    fitting = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not fitting or value < 0 or (value == 0 and not zero):
        raise UsageError(f"{_words(name)} {value}; needs a number {'of at least' if zero else 'above'} 0.")


def _words(name: str) -> str:
    return name.replace("_", " ")
