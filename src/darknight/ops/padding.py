"""Padding as an explicit linear map, with its transpose."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from darknight.errors import OpError

MODES = ("zeros", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class Padding:
    """(left, right) for each spatial axis, in the axes' order, and how the border is filled."""

    amounts: tuple[tuple[int, int], ...]
    mode: str = "zeros"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OpError(f"padding mode {self.mode!r}; known are {', '.join(MODES)}.")
        if any(amount < 0 for pair in self.amounts for amount in pair):
            raise OpError(f"padding {self.amounts}: amounts must not be negative.")

    @property
    def symmetric_zeros(self) -> bool:
        """Whether a convolution's own padding argument can do it."""
        return self.mode == "zeros" and all(left == right for left, right in self.amounts)

    @property
    def nothing(self) -> bool:
        return all(pair == (0, 0) for pair in self.amounts)

    def padded(self, spatial: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size + left + right for size, (left, right) in zip(spatial, self.amounts, strict=True))

    def without_zeros(self, spatial: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes that are left when zeros are left out, and how many were left out before each axis."""
        if self.mode == "zeros":
            return spatial, tuple(left for left, _ in self.amounts)
        return self.padded(spatial), (0,) * len(self.amounts)

    def apply(self, x: Tensor) -> Tensor:
        """(a, b, *spatial) -> (a, b, *padded)."""
        if self.nothing:
            return x
        flat = [amount for pair in reversed(self.amounts) for amount in pair]
        try:
            return F.pad(x, flat, mode="constant" if self.mode == "zeros" else self.mode)
        except RuntimeError as error:  # e.g. reflection wider than the input
            raise OpError(
                f"padding {self.amounts} in mode {self.mode!r} of an input {tuple(x.shape)}: {error}"
            ) from None

    def transpose(self, padded: Tensor, spatial: tuple[int, ...]) -> Tensor:
        """The transpose of `apply`: every padded element goes back to the element that it was copied from."""
        if self.nothing:
            return padded
        if self.mode == "zeros":
            inner = tuple(slice(left, left + size) for size, (left, _) in zip(spatial, self.amounts, strict=True))
            return padded[(slice(None),) * (padded.dim() - len(inner)) + inner].contiguous()
        origin = self._origin(spatial).to(padded.device)
        lead = padded.shape[: padded.dim() - len(spatial)]
        total = padded.new_zeros(*lead, prod(spatial))
        total.index_add_(-1, origin, padded.flatten(len(lead)))
        return total.view(*lead, *spatial)

    def multiplicity(self, spatial: tuple[int, ...]) -> int:
        """How many padded elements at most are copies of one element."""
        if self.mode == "zeros":
            return 1
        return int(torch.bincount(self._origin(spatial)).max())

    def _origin(self, spatial: tuple[int, ...]) -> Tensor:
        numbers = torch.arange(prod(spatial), dtype=torch.float64)
        return self.apply(numbers.view(1, 1, *spatial)).flatten().to(torch.int64)
