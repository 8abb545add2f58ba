"""The shares of one masking, and which of them need not be sent as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from darknight.types import Seed


class MaskedShares(list[Tensor]):
    """By worker, (group, *feature). seeds: of those that are a noise row and nothing else, by worker.

    Guarantees: a seed opens the row that it is for, of that masking, and no other (contract test:
        tests/coding/test_seeds.py).
    Assumes: it goes where its share may go, and nowhere else (runtime.desk).
    """

    def __init__(self, shares: Iterable[Tensor], seeds: Mapping[int, Seed]) -> None:
        super().__init__(shares)
        self.seeds = seeds
