"""The shares of one masking, made where their workers read them.

A room is memory that a worker reads its share from. What is written there has left the enclave: custody hears of it
before, and nobody reads it from there again, because the worker can write to it. Who wants a share that lies in a room
(to do a missing worker's part, to send it to somebody else, to find out who lied) gets one that is made again, from the
same noise.

Guarantees: what the enclave uses of a share, or sends to another worker, is what was masked, whatever a worker does to
    its memory (contract test: tests/runtime/test_rooms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from darknight.coding import MaskedShares
from darknight.types import Seed


@dataclass(frozen=True, eq=False)
class Room:
    """holder: the worker, and its epoch when this was made."""

    holder: tuple[int, int]
    tensor: Tensor


Rooms = Mapping[int, Tensor]  # by seat


@dataclass(frozen=True, eq=False)
class Maker:
    """mask: makes the shares by seat, with fresh noise, in these rooms as far as it can. again: one of them again."""

    mask: Callable[[Rooms], Sequence[Tensor]]
    again: Callable[[int], Tensor]

    @classmethod
    def of(cls, shares: Sequence[Tensor]) -> Maker:
        """Of shares that are made already, in memory of the enclave's own."""
        return cls(lambda _: shares, lambda seat: shares[seat])


class Masking:
    """Shares by seat, (group, *feature)."""

    def __init__(self, maker: Maker, rooms: Mapping[int, Room]) -> None:
        shares = maker.mask({seat: room.tensor for seat, room in rooms.items()})
        self.seeds: Mapping[int, Seed] = shares.seeds if isinstance(shares, MaskedShares) else {}
        self._rooms = {seat: room for seat, room in rooms.items() if shares[seat] is room.tensor}
        self._made = {seat: share for seat, share in enumerate(shares) if seat not in self._rooms}
        self._again = maker.again

    def __getitem__(self, seat: int) -> Tensor:
        """In memory of the enclave's own."""
        if seat not in self._made:
            self._made[seat] = self._again(seat)
        return self._made[seat]

    def lies_with(self, seat: int, holder: tuple[int, int]) -> bool:
        """Whether the share was made in a room of `holder`, and not asked with yet: then custody has heard of it."""
        room = self._rooms.get(seat)
        return room is not None and room.holder == holder

    def outgoing(self, seat: int, holder: tuple[int, int]) -> Tensor:
        """To be sent to `holder`: from its room, if it was made there, and once."""
        room = self._rooms.pop(seat, None)
        return room.tensor if room is not None and room.holder == holder else self[seat]
