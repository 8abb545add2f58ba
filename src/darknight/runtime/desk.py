"""What both kinds of rounds need: who takes part in a pass, and leave to send a share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from darknight.accounting import Ledger, Resent
from darknight.coding import Code, Mixing, Scheme, group_count
from darknight.ops import either
from darknight.runtime.crew import Crew
from darknight.runtime.layer import Layer
from darknight.runtime.masking import Room
from darknight.types import Expected, Pass


class Desk:
    """Of one runtime."""

    def __init__(self, scheme: Scheme, crew: Crew, ledger: Ledger, prime: int | None, dtype: torch.dtype) -> None:
        self.scheme = scheme
        self.crew = crew
        self.ledger = ledger
        self.prime = prime
        self.dtype = dtype
        # Answers are decoded where their workers wrote them, if nothing but the decoding reads them.
        self.in_place = prime is not None and scheme.integrity == "freivalds"
        # Real arithmetic makes its shares before anybody is asked.
        self.makes_in_rooms = prime is not None
        self._calls = 0

    def open_call(self) -> int:
        """A number that was never used before: of a call, and of the masking of its input or gradient."""
        self._calls += 1
        return self._calls

    def share_shape(self, x_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of each share of a batch of this shape."""
        return (group_count(x_shape[0], self.scheme.inputs), *x_shape[1:])

    def begin(self) -> None:
        self.crew.forget(worth=True)
        self.crew.settle()

    def may_send(self, masking: int, seat: int, worker: int) -> bool:
        return self.crew.custody.may_send(masking, seat, worker)

    def note_sent(self, layer: Layer, masking: int, seat: int, worker: int) -> None:
        """Asks leave of the custody, which raises where a share may not go."""
        if self.crew.custody.sent(masking, seat, worker):
            self.ledger.record(Resent(layer=layer.label, seat=seat, worker=self.crew.name(worker)))

    def leave_to_send(self, layer: Layer, masking: int, seat: int, worker: int) -> bool:
        """Whether the worker may have the share; then from now on it has it."""
        if not self.may_send(masking, seat, worker):
            return False
        self.note_sent(layer, masking, seat, worker)
        return True

    def rooms(
        self, layer: Layer, masking: int, workers: Mapping[int, int | None], shape: tuple[int, ...]
    ) -> dict[int, Room]:
        """By seat, where its share may be made: from now on its worker has it. workers: by seat, who is to have it."""
        rooms: dict[int, Room] = {}
        for seat, worker in workers.items():
            if worker is None or not self.makes_in_rooms or not self.may_send(masking, seat, worker):
                continue
            holder = self.crew.now(worker)
            tensor = self.crew.room(worker, shape, self.dtype)
            if tensor is not None:
                self.note_sent(layer, masking, seat, worker)
                rooms[seat] = Room(holder, tensor)
        return rooms

    def expected(self, shapes: Mapping[Pass, tuple[int, ...]], *, lent: bool = False) -> Expected:
        """lent: as far as answers are read in place."""
        return Expected(shapes, self.dtype, self.prime, lent and self.in_place)

    def clear_share(self, code: Code, deltas: Tensor, seat: int) -> Tensor:
        """What the worker of a seat makes of gradients in the clear."""
        return either.combine_clear(self.coefficients(code, seat), deltas, self.prime)

    def coefficients(self, code: Code, seat: int) -> tuple[float, ...]:
        row = code.B.data[seat]
        return tuple(float(value) if self.prime is None else int(value) for value in row)

    # --- who --------------------------------------------------------------------------------------------------------
    def enough(self, kind: Pass, code: Code) -> int | None:
        """K + M if any such answers will do. Parity wants all of them, and a weight gradient is a sum: then None."""
        masked = kind is Pass.FORWARD or code.masks_gradients
        if kind is not Pass.GRAD_WEIGHT and masked and self.scheme.integrity in ("freivalds", "off"):
            return _decoding(_mixing(kind, code))
        return None

    def wanted(self, kind: Pass, code: Code, there: Callable[[int], bool]) -> tuple[int, ...]:
        """Seats that compute in this pass: those that decode and the spares; with parity, all.

        If one of them is empty from the start, another that would be idle computes in its place.
        """
        mixing, everyone = _mixing(kind, code), range(self.scheme.workers)
        if kind is Pass.GRAD_WEIGHT or not mixing.colluders:
            return code.grad_rows
        if self.scheme.integrity in ("parity", "both"):
            return tuple(everyone)
        base, spares = set(mixing.base), self.scheme.base_workers
        usual = [seat for seat in everyone if seat in base or seat >= spares]
        short = _decoding(mixing) - sum([there(seat) for seat in usual])
        if short <= 0:
            return tuple(usual)
        idle = [seat for seat in everyone if seat not in usual and there(seat)]
        return (*usual, *idle[:short])


def _mixing(kind: Pass, code: Code) -> Mixing:
    return code.A if kind is Pass.FORWARD else code.B


def _decoding(mixing: Mixing) -> int:
    """How many answers decode."""
    return mixing.inputs + mixing.colluders
