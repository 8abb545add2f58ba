"""The answers to one pass, and where the missing ones come from.

In the order of preference, for an answer that is missing:

1. Forward and grad input: another worker's. The systematic code has workers that idle in a pass and hold a share all
   the same; any K + M answers decode. This needs a check that does not need *all* answers (Freivalds).
2. A standby's, which gets the share unchanged. Weight gradients have no redundancy, so theirs begin here.
3. The enclave's own: it makes the share again from the same noise and does that worker's part.

An answer is also missing when it was wrong: whoever gave it is out by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from darknight.accounting import DoneInEnclave, Ledger
from darknight.runtime.crew import Round
from darknight.runtime.layer import Layer
from darknight.types import Pass

Mix = Callable[[Tensor], Tensor]  # (group, ...) -> (1, ...), linear
Ask = Callable[[Iterable[int]], Round]
Question = Callable[[Mapping[int, tuple[int, Mix]]], Round]  # by seat: its worker, and what to ask


class OwnParts:
    """Parts of a pass that the enclave does itself; the ledger hears of each."""

    def __init__(self, ledger: Ledger, layer: Layer, kind: Pass, compute: Callable[[int], Tensor]) -> None:
        self._ledger = ledger
        self._layer = layer
        self._kind = kind
        self._compute = compute

    def part(self, seat: int) -> Tensor:
        self._ledger.record(DoneInEnclave(layer=self._layer.label, kind=self._kind, seat=seat))
        return self._compute(seat)


class Gathered:
    """Answers by seat. `by` has the worker that gave each of them, if it was not the enclave.

    An answer may be where its worker can still write to it: decode it, which reads it once, and `take_copies` before
    it is looked at again.

    enough: how many decode, whosesoever they are; None where every wanted one is needed. ask: sends a round of tasks
    for these seats. settle: lets standbys take empty seats. question: see `question`.
    """

    def __init__(
        self,
        *,
        call: int,
        kind: Pass,
        seats: int,
        wanted: Sequence[int],
        enough: int | None,
        ask: Ask,
        settle: Callable[[], None],
        question: Question,
        parts: OwnParts,
    ) -> None:
        self.call = call
        self.kind = kind
        self.answers: dict[int, Tensor] = {}
        self.by: dict[int, int] = {}
        self._lent: set[int] = set()
        self._dropped: set[int] = set()
        self._all = [*wanted, *(seat for seat in range(seats) if seat not in wanted)]
        self.wanted = tuple(wanted)
        self._enough = enough
        self._ask = ask
        self._settle = settle
        self._question = question
        self._parts = parts

    def add(self, found: Round) -> None:
        for seat, tensors in found.answers.items():
            if self.kind in tensors:
                self.answers[seat] = tensors[self.kind]
                self.by[seat] = found.by[seat]
                self._lent.update({seat} & found.lent.keys())

    def make(self, vacant: AbstractSet[int]) -> None:
        """Of seats that nobody holds, while the others compute: if their answers are needed at all."""
        if self._enough is None:
            self._do(sorted(vacant & set(self.wanted)))

    def fill(self) -> None:
        """Adds answers until they are enough: from workers that idle, from standbys, from the enclave."""
        tried = {*self.wanted, *self._dropped}
        while self._enough is not None and self._short > 0:
            idle = [seat for seat in self._all if seat not in tried and seat not in self.answers][: self._short]
            if not idle:
                break
            tried.update(idle)
            self.add(self._ask(idle))
        if self._short <= 0:
            return
        self._settle()
        missing = [seat for seat in self._all if seat not in self.answers][: self._short]
        self.add(self._ask(missing))
        self._do(seat for seat in missing if seat not in self.answers)

    def without(self, seats: Iterable[int]) -> None:
        """Drops these answers, and fills up."""
        for seat in seats:
            self._dropped.add(seat)
            self.answers.pop(seat, None)
            self.by.pop(seat, None)
            self._lent.discard(seat)
        self.fill()

    def take_copies(self) -> bool:
        """From now on these answers do not change, whoever gave them. False if no worker could change one before."""
        lent, self._lent = self._lent, set()
        for seat in lent:
            self.answers[seat] = self.answers[seat].clone()
        return bool(lent)

    def done_by_enclave(self) -> dict[int, Tensor]:
        """What workers had answered; the enclave has done all of it again, and nobody else's answer is left."""
        theirs = {seat: self.answers[seat] for seat in self.by}
        self.by = {}
        self._do(theirs)
        return theirs

    def question(self, mixtures: Mapping[int, Mix]) -> dict[int, Tensor]:
        """What the workers that answered for these seats say to a mixture of the groups that they hold already."""
        found = self._question({seat: (self.by[seat], mix) for seat, mix in mixtures.items()})
        return {seat: tensors[self.kind] for seat, tensors in found.answers.items()}

    @property
    def _short(self) -> int:
        return (len(self.wanted) if self._enough is None else self._enough) - len(self.answers)

    def _do(self, seats: Iterable[int]) -> None:
        for seat in seats:
            self.answers[seat] = self._parts.part(seat)
