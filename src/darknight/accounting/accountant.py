"""Adding up what maskings may have shown: by layer, by coalition, in all.

Noise is fresh for every masking, so bounds add: over layers, steps, epochs, re-maskings and recomputation. A share that
is sent again unchanged shows nothing new and is no event of this kind.

Guarantees: `total.nats` is at least what any M workers learned about one example that was in every batch, whichever
    seats they took in the course of time; `total.everything` at least what they learned about all examples together
    (contract tests: tests/accounting/test_accountant.py, tests/runtime/test_composition.py).
Assumes: an event for every masking; examples along the first axis of every layer's input. For `total.nats`, layers that
    do not mix examples: batch norm in training does, and what it carries into other examples' shares is in
    `total.everything` alone.
Leaks: nothing; these are numbers about public parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from darknight.accounting.events import Masked, SentClear
from darknight.accounting.leakage import Coalition, in_bits
from darknight.errors import UsageError


@dataclass(kw_only=True)
class Account:
    """Sums over maskings, in nats.

    scalar: about one number that was in all of them. nats: about one example. everything: about all examples together.
    paper: about one example, by the paper's theorem. clear: batches that went out unmasked, for which no sum speaks.
    """

    maskings: int = 0
    clear: int = 0
    scalar: float = 0.0
    nats: float = 0.0
    everything: float = 0.0
    paper: float = 0.0

    def add(self, other: Account) -> None:
        self.maskings += other.maskings
        self.clear += other.clear
        self.scalar += other.scalar
        self.nats += other.nats
        self.everything += other.everything
        self.paper += other.paper

    @classmethod
    def of(cls, event: Masked) -> Account:
        return cls(
            maskings=1,
            scalar=event.nats,
            nats=event.nats_per_example,
            everything=event.groups * event.nats_per_example,
            paper=event.features * event.paper,
        )


class Accountant:
    """Accounts by layer and by what was masked there ("input", "gradient"), and the sum of all of them."""

    def __init__(self, colluders: int = 1) -> None:
        self._colluders = colluders
        self.total = Account()
        self.layers: dict[tuple[str, str], Account] = {}
        self.coalitions: dict[Coalition, float] = {}  # about one example, for workers that keep to these seats
        self.largest = 0.0  # nats about one number in one masking
        self.costliest_step = 0.0  # nats about one example; accounting.budget knows what a step is

    def masked(self, event: Masked) -> None:
        self._book(event.layer, event.what, Account.of(event))
        self.largest = max(self.largest, event.nats)
        for coalition, nats in event.by_coalition.items():
            self.coalitions[coalition] = self.coalitions.get(coalition, 0.0) + event.features * nats

    def sent_clear(self, event: SentClear) -> None:
        self._book(event.layer, "gradient", Account(clear=1))

    def _book(self, layer: str, what: str, account: Account) -> None:
        self.total.add(account)
        self.layers.setdefault((layer, what), Account()).add(account)

    # --- coalitions -------------------------------------------------------------------------------------------------
    def seen_by(self, seats: Iterable[int]) -> float:
        """Nats about one example that was in every batch, to whoever held these seats all the time.

        Fewer than M seats see no more than any M that include them; for more than M there is no bound.
        """
        wanted = set(seats)
        if self.total.clear or (self.total.maskings and len(wanted) > self._colluders):
            return math.inf
        return min((nats for known, nats in self.coalitions.items() if wanted <= set(known)), default=0.0)

    @property
    def worst(self) -> tuple[Coalition, float]:
        """The M seats that were shown most; no seats if nothing was."""
        return max(self.coalitions.items(), key=lambda entry: entry[1], default=((), 0.0))

    # --- states -----------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers, so that a training that goes on elsewhere goes on counting."""
        return {
            **asdict(self.total),
            "largest": self.largest,
            "step": self.costliest_step,
            "layers": [{"layer": layer, "what": what, **asdict(one)} for (layer, what), one in self.layers.items()],
            "coalitions": [[list(seats), nats] for seats, nats in self.coalitions.items()],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Accountant:
        """From what `state` gave; UsageError if it is damaged."""
        found = cls()
        try:
            found.total = _account(state)
            found.largest, found.costliest_step = _number(state["largest"]), _number(state["step"])
            found.layers = {(entry["layer"], entry["what"]): _account(entry) for entry in state["layers"]}
            found.coalitions = {tuple(map(int, seats)): _number(nats) for seats, nats in state["coalitions"]}
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError("the state's leakage is damaged. Load one that state_dict() gave.") from error
        return found

    def add(self, earlier: Accountant) -> None:
        """What was shown in an earlier run counts in this one."""
        self.total.add(earlier.total)
        self.largest = max(self.largest, earlier.largest)
        self.costliest_step = max(self.costliest_step, earlier.costliest_step)
        for key, account in earlier.layers.items():
            self.layers.setdefault(key, Account()).add(account)
        for seats, nats in earlier.coalitions.items():
            self.coalitions[seats] = self.coalitions.get(seats, 0.0) + nats

    def words(self) -> list[dict[str, object]]:
        """A row for each account, of plain numbers and words."""
        return [
            {
                "layer": layer,
                "what": what,
                "maskings": account.maskings,
                "batches_in_the_clear": account.clear,
                "nats_per_scalar": account.scalar,
                "nats_per_example": account.nats,
                "bits_per_example": in_bits(account.nats),
                "nats_in_all": account.everything,
                "paper_nats_per_example": account.paper,
            }
            for (layer, what), account in self.layers.items()
        ]


def _account(state: Mapping[str, Any]) -> Account:
    return Account(**{each.name: _number(state[each.name]) for each in fields(Account)})  # type: ignore[arg-type]


def _number(value: object) -> float:
    """A number that counts up; a whole one stays whole."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError
    return value
