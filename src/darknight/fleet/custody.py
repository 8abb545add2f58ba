"""Who was ever sent which share: a worker sees one share of a masking, and an operator at most M.

Guarantees: a share is sent only where the rule allows it; anything else raises before it is sent. So any M workers hold
    at most M distinct shares, however often they leave, come back and take other seats. A share may be sent again only
    unchanged, and only to a worker whose operator holds no other share of that masking (contract tests:
    tests/fleet/test_custody.py, and tests/runtime/test_faults.py watches every share ever sent).
Assumes: that workers of different operators do not pool what they see beyond the scheme's colluders; that the caller
    re-sends the very same share (it is made again from the same noise).
"""

from __future__ import annotations

from collections.abc import Sequence

from darknight.errors import FleetError


class Custody:
    """The shares of every masking that is under way."""

    def __init__(self, operators: Sequence[str], colluders: int, *, one_operator: bool = False) -> None:
        self._operators = tuple(operators)
        self._colluders = colluders
        self._one_operator = one_operator
        self._maskings: dict[int, dict[int, set[int]]] = {}  # by masking and worker

    def may_send(self, masking: int, seat: int, worker: int) -> bool:
        """Whether `worker` may be given the share of `seat`."""
        holders = self._maskings.get(masking)
        if self._one_operator or not holders:
            return True
        operator, held, before = self._operators[worker], {seat}, False
        for other, seats in holders.items():
            if seat in seats:
                before = True
                if len(seats) == 1:
                    continue  # nothing but this share
            if other == worker:
                return False  # M workers hold at most M shares only if each holds one
            if self._operators[other] == operator:
                held |= seats
        return len(held) <= (1 if before else self._colluders)

    def sent(self, masking: int, seat: int, worker: int) -> bool:
        """To be called before the share leaves. Raises where the rule forbids it. True if another operator has it."""
        if not self.may_send(masking, seat, worker):
            raise FleetError(
                f"operator {self._operators[worker]!r} would hold more shares of one masking than colluders="
                f"{self._colluders} allows. Nothing was sent."
            )
        holders, operator = self._maskings.setdefault(masking, {}), self._operators[worker]
        holders.setdefault(worker, set()).add(seat)
        return any(seat in seats and self._operators[other] != operator for other, seats in holders.items())

    def forget(self, masking: int) -> None:
        """The masking is over: none of its shares will be sent again."""
        self._maskings.pop(masking, None)
