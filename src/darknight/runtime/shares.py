"""The shares of one masking, where they were written: some straight into memory that their workers see.

Guarantees: what a worker did to the memory of its share reaches nobody else, and is never read here: such a share is
    handed out once, to the worker whose memory it is in, and everybody else gets it made again from the same noise
    (contract tests: tests/runtime/test_shares.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import overload

from torch import Tensor


class PlacedShares(Sequence[Tensor]):
    """By seat. A share that is asked for by its seat is the enclave's own.

    tensors: as they were encoded. places: by seat, the worker that sees the memory of its share, and its epoch. again:
    makes one again.
    """

    def __init__(
        self, tensors: Sequence[Tensor], places: Mapping[int, tuple[int, int]], again: Callable[[int], Tensor]
    ) -> None:
        self._tensors: list[Tensor | None] = list(tensors)
        self.shape = tuple(tensors[0].shape)
        self._places = dict(places)
        self._again = again

    def outgoing(self, seat: int, holder: tuple[int, int]) -> Tensor:
        """The share of `seat` for a worker in its epoch: where it lies, if it can be sent from there."""
        tensor = self._tensors[seat]
        if seat not in self._places or tensor is None:
            return self[seat]
        if self._places[seat] != holder:
            return self._again(seat)
        self._tensors[seat] = None  # from now on its memory is the link's, and other shares may lie there
        return tensor

    def release(self) -> None:
        """The pass is over: what was not sent from workers' memory is given back at once, whoever still has this."""
        self._tensors = [None if seat in self._places else tensor for seat, tensor in enumerate(self._tensors)]

    @overload
    def __getitem__(self, seat: int) -> Tensor: ...

    @overload
    def __getitem__(self, seat: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, seat: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(seat, slice):
            return [self[each] for each in range(*seat.indices(len(self)))]
        tensor = self._tensors[seat]
        return self._again(seat) if seat in self._places or tensor is None else tensor

    def __len__(self) -> int:
        return len(self._tensors)
