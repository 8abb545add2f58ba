"""The ledger of a runtime: what leaked at most, what was checked, what went wrong, what was sent, where time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from darknight.accounting.accountant import Accountant
from darknight.accounting.budget import Budget
from darknight.accounting.events import (
    Blamed,
    BoundRaised,
    DoneInEnclave,
    Event,
    Failed,
    Masked,
    Missed,
    Overflow,
    Reseated,
    Resent,
    SentClear,
    Spent,
    Traffic,
    Unchecked,
    Unexplained,
    Verified,
)
from darknight.accounting.leakage import in_bits
from darknight.types import Pass

VISIBLE_ANYWAY = (
    "shapes, the number and timing of calls, retries after overflow",
    "the weights, and so the aggregate gradient of every step",
    "everything, to one operator that holds more than M shares",
)
VISIBLE_IN_REAL = (
    "the bounds of inputs and gradients, which follow the largest value seen",
    "what batch norm carries from one example into the shares of others: the bound about all examples covers it",
)

ONE_OPERATOR = "EVERYTHING IS VISIBLE: insecure_one_operator=True lets one operator hold all shares, which hide nothing"


class Ledger:
    """Adds up events. An event that it does not know raises TypeError: nothing goes uncounted.

    exact: shares leak nothing (Field). sends: there are workers. one_operator: nobody keeps one operator from holding
    every share, so nothing is hidden from it. colluders, seats: of the scheme, by number and in words. budget: nats
    about one example that is in every batch; see `accounting.budget`.

    Leakage is counted for an example that was in every batch: see `accounting.accountant`. For gradients in the clear
    there is no bound, only their number.
    """

    def __init__(
        self,
        *,
        exact: bool,
        not_covered: Sequence[str],
        sends: bool = True,
        one_operator: bool = False,
        colluders: int = 1,
        seats: Sequence[str] = (),
        budget: float | None = None,
    ) -> None:
        self._exact = exact
        self._sends = sends
        self._one_operator = sends and one_operator
        self._not_covered = tuple(not_covered)
        self._colluders = colluders
        self._seats = tuple(seats)
        self.accountant = Accountant(colluders)
        self.budget = Budget(budget, self.accountant)
        self.passed: Counter[Pass] = Counter()
        self.unchecked: Counter[Pass] = Counter()
        self.failed: list[Failed] = []
        self.blamed: list[Blamed] = []
        self.unexplained: list[Unexplained] = []
        self.overflows: Counter[str] = Counter()
        self.bounds_raised: list[BoundRaised] = []
        self.missed: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}  # by worker, the latest
        self.reseated: list[Reseated] = []
        self.resent = 0
        self.done_in_enclave: Counter[Pass] = Counter()
        self.sent_bytes = 0
        self.received_bytes = 0
        self.layer_seconds = 0.0
        self.waiting_seconds = 0.0
        self.worker_seconds = 0.0
        self._handlers: dict[type, Callable[..., None]] = {
            Masked: self.accountant.masked,
            SentClear: self.accountant.sent_clear,
            Verified: self._verified,
            Unchecked: self._unchecked,
            Failed: self.failed.append,
            Blamed: self.blamed.append,
            Unexplained: self.unexplained.append,
            Overflow: self._overflow,
            BoundRaised: self.bounds_raised.append,
            Traffic: self._traffic,
            Spent: self._spent,
            Missed: self._missed,
            Reseated: self.reseated.append,
            Resent: self._resent,
            DoneInEnclave: self._done_in_enclave,
        }

    @property
    def nats_per_example(self) -> float:
        """To any M workers, about an example that was in every batch."""
        return self.accountant.total.nats

    @property
    def maskings(self) -> int:
        return self.accountant.total.maskings

    @property
    def sent_clear(self) -> int:
        """Batches of gradients that went out unmasked."""
        return self.accountant.total.clear

    @property
    def leaked(self) -> dict[str, Any]:
        """What a checkpoint keeps: leakage does not begin anew when a training goes on elsewhere."""
        return self.accountant.state()

    def leaked_before(self, earlier: Accountant) -> None:
        """Adds what was shown in an earlier run: `Accountant.of` what `leaked` gave."""
        self.accountant.add(earlier)

    def record(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"an event {type(event).__name__} that the ledger does not know; teach it first.")
        handler(event)

    @property
    def leakage_in_words(self) -> str:
        if not self._sends:
            return "nothing was sent: there are no workers"
        if self._one_operator:
            return ONE_OPERATOR
        if self._exact:
            words = "0 nats from the shares of any M workers (exact arithmetic in a finite field)"
        else:
            words = (
                f"at most {_nats(self.nats_per_example)} to any M workers about an example that was in every batch "
                f"({self.maskings:,} maskings)"
            )
        if self.sent_clear:
            clear = f"{self.sent_clear:,} batches of gradients in the clear, without any bound"
            return f"from masked shares {words}; and {clear}"
        return words

    @property
    def leakage_details(self) -> tuple[str, ...]:
        """More about the bound, in lines; what is left of the budget."""
        if not self._sends or self._one_operator:
            return ()
        total, (seats, worst) = self.accountant.total, self.accountant.worst
        lines = []
        if total.nats:
            names = ", ".join(self._seats[seat] if self._seats else f"seat {seat}" for seat in seats)
            theorem = ("1, which takes inputs for independent", "2, whose condition is too weak")[self._colluders > 1]
            lines = [
                f"of one number in one masking at most {_nats(self.accountant.largest)}; about all examples together "
                f"at most {_nats(total.everything)}",
                f"the paper's Theorem {theorem}, would say {total.paper:.3g} nats; we say {total.nats:.3g}",
                f"of workers that kept their seats, most to {names}: at most {worst:.3g} nats",
            ]
        if self.budget.limit is not None:
            lines.append(
                f"{100 * total.nats / self.budget.limit:.3g} % of the budget of {self.budget.limit:.3g} nats used, "
                f"{100 * self.accountant.costliest_step / self.budget.limit:.3g} % by the costliest step"
            )
        return tuple(lines)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the bound does not speak of: the scheme's own caveats, and what is visible with any scheme."""
        if not self._sends:
            return ()
        return (*self._not_covered, *(() if self._exact else VISIBLE_IN_REAL), *VISIBLE_ANYWAY)

    def summary(self) -> dict[str, object]:
        """Everything as nested dictionaries of plain numbers and words."""
        return {
            "leakage": self._leakage(),
            "not_covered": list(self.not_covered),
            "integrity": {
                "passed": {kind.value: self.passed[kind] for kind in Pass},
                "unchecked": {kind.value: self.unchecked[kind] for kind in Pass},
                "failed": len(self.failed),
                "blamed": [_evidence(event) for event in self.blamed],
                "unexplained": len(self.unexplained),
                "overflows": self.overflows.total(),
            },
            "bounds_raised": len(self.bounds_raised),
            "faults": {
                "answers_missed": dict(sorted(self.missed.items())),
                "latest_reasons": dict(sorted(self.reasons.items())),
                "seats_changed": len(self.reseated),
                "shares_resent": self.resent,
                "done_in_enclave": {kind.value: self.done_in_enclave[kind] for kind in Pass},
            },
            "traffic": {"sent_bytes": self.sent_bytes, "received_bytes": self.received_bytes},
            "time": {
                "masking_seconds": self.layer_seconds - self.waiting_seconds,
                "waiting_seconds": self.waiting_seconds,
                "worker_seconds": self.worker_seconds,
            },
        }

    def _leakage(self) -> dict[str, object]:
        total, (seats, worst) = self.accountant.total, self.accountant.worst
        return {
            "nats_per_example": total.nats,
            "bits_per_example": in_bits(total.nats),
            "nats_in_all": total.everything,
            "nats_per_scalar": self.accountant.largest,
            "costliest_step": self.accountant.costliest_step,
            "maskings": total.maskings,
            "batches_in_the_clear": total.clear,
            "worst_seats": {
                "seats": list(seats),
                "names": [self._seats[seat] for seat in seats] if self._seats else [],
                "nats_per_example": worst,
            },
            "paper": None
            if self._exact
            else {"theorem": 1 if self._colluders == 1 else 2, "nats_per_example": total.paper},
            "budget": None if self.budget.limit is None else {"nats": self.budget.limit, "left": self.budget.left},
            "layers": self.accountant.words(),
            "words": self.leakage_in_words,
            "details": list(self.leakage_details),
        }

    def __str__(self) -> str:
        checks = ", ".join(f"{kind.value} {self.passed[kind]:,}" for kind in Pass)
        unchecked = f", {self.unchecked.total():,} results unchecked" if self.unchecked.total() else ""
        repeated = ", ".join(f"{layer} {count:,}" for layer, count in self.overflows.most_common(5))
        changes = (
            f"overflows    {self.overflows.total():,} passes repeated at a smaller scale{repeated and f' ({repeated})'}"
            if self._exact
            else f"bounds       set or raised {len(self.bounds_raised):,} times"
        )
        lines = [
            f"leakage      {self.leakage_in_words}",
            *(f"             {line}" for line in self.leakage_details),
            *(f"not covered  {line}" for line in self.not_covered),
            f"integrity    {checks} checks passed, {len(self.failed)} failed{unchecked}",
            *(f"             {line}" for line in self._blame_in_words),
            changes,
            f"faults       {self._faults_in_words}",
            *(f"             {reason}" for _, reason in sorted(self.reasons.items())),
            f"traffic      {_megabytes(self.sent_bytes)} sent, {_megabytes(self.received_bytes)} received",
            f"wall time    {self.layer_seconds - self.waiting_seconds:.1f} s masking, unmasking and checking, "
            f"{self.waiting_seconds:.1f} s waiting for workers ({self.worker_seconds:.1f} s of computing)",
        ]
        return "\n".join(lines)

    @property
    def _blame_in_words(self) -> list[str]:
        lines = [
            f"{event.worker} is out: {event.finding} (layer {event.layer}, call {event.call}, {event.kind.value}; "
            f"found by {event.check})"
            for event in self.blamed
        ]
        if self.unexplained:
            lines.append(f"{len(self.unexplained)} of the failed checks could be put down to nobody")
        return lines

    @property
    def _faults_in_words(self) -> str:
        return (
            f"{self.missed.total():,} answers missed, {self.resent:,} shares sent again, "
            f"{self.done_in_enclave.total():,} parts done in the enclave"
        )

    def _missed(self, event: Missed) -> None:
        self.missed[event.worker] += 1
        self.reasons[event.worker] = event.reason

    def _resent(self, event: Resent) -> None:
        self.resent += 1

    def _done_in_enclave(self, event: DoneInEnclave) -> None:
        self.done_in_enclave[event.kind] += 1

    def _verified(self, event: Verified) -> None:
        self.passed[event.kind] += 1

    def _unchecked(self, event: Unchecked) -> None:
        self.unchecked[event.kind] += 1

    def _overflow(self, event: Overflow) -> None:
        self.overflows[event.layer] += 1

    def _traffic(self, event: Traffic) -> None:
        self.sent_bytes += event.sent
        self.received_bytes += event.received

    def _spent(self, event: Spent) -> None:
        self.layer_seconds += event.total
        self.waiting_seconds += event.waiting
        self.worker_seconds += event.workers


def _nats(nats: float) -> str:
    return f"{nats:.3g} nats ({in_bits(nats):.3g} bits)"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _evidence(event: Blamed) -> dict[str, object]:
    return {**asdict(event), "kind": event.kind.value}
