"""The ledger of a runtime: what leaked at most, what was checked, what went wrong, what was sent, where time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

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
from darknight.types import Pass

VISIBLE_ANYWAY = (
    "shapes, the number and timing of calls, retries after overflow",
    "the weights, and so the aggregate gradient of every step",
    "everything, to one operator that holds more than M shares",
)


ONE_OPERATOR = "EVERYTHING IS VISIBLE: insecure_one_operator=True lets one operator hold all shares, which hide nothing"


class Ledger:
    """Adds up events. An event that it does not know raises TypeError: nothing goes uncounted.

    exact: shares leak nothing (Field). sends: there are workers. Leakage is counted for an example that was in every
    batch: bounds add over layers, passes and steps. For gradients in the clear there is no bound, only their number.
    one_operator: nobody keeps one operator from holding every share, so nothing is hidden from it.
    """

    def __init__(
        self, *, exact: bool, not_covered: Sequence[str], sends: bool = True, one_operator: bool = False
    ) -> None:
        self._exact = exact
        self._sends = sends
        self._one_operator = sends and one_operator
        self._not_covered = tuple(not_covered)
        self.nats_per_example = 0.0
        self.maskings = 0
        self.sent_clear = 0
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
            Masked: self._masked,
            SentClear: self._sent_clear,
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
    def leaked(self) -> dict[str, float]:
        """What a checkpoint keeps: leakage does not begin anew when a training goes on elsewhere."""
        return {"nats": self.nats_per_example, "maskings": self.maskings, "clear": self.sent_clear}

    def leaked_before(self, leaked: Mapping[str, float]) -> None:
        """Adds what `leaked` gave in an earlier run."""
        self.nats_per_example += leaked["nats"]
        self.maskings += int(leaked["maskings"])
        self.sent_clear += int(leaked["clear"])

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
                f"at most {self.nats_per_example:.3g} nats to any M workers about an example that was in every batch "
                f"({self.maskings} maskings)"
            )
        if self.sent_clear:
            clear = f"{self.sent_clear:,} batches of gradients in the clear, without any bound"
            return f"from masked shares {words}; and {clear}"
        return words

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the bound does not speak of: the scheme's own caveats, and what is visible with any scheme."""
        if not self._sends:
            return ()
        bounds = () if self._exact else ("the bounds of inputs and gradients, which follow the largest value seen",)
        return (*self._not_covered, *bounds, *VISIBLE_ANYWAY)

    def summary(self) -> dict[str, object]:
        """Everything as nested dictionaries of plain numbers and words."""
        return {
            "leakage": {
                "nats_per_example": self.nats_per_example,
                "batches_in_the_clear": self.sent_clear,
                "words": self.leakage_in_words,
            },
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

    def _masked(self, event: Masked) -> None:
        self.maskings += 1
        self.nats_per_example += event.features * event.nats

    def _sent_clear(self, event: SentClear) -> None:
        self.sent_clear += 1

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


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _evidence(event: Blamed) -> dict[str, object]:
    return {**asdict(event), "kind": event.kind.value}
