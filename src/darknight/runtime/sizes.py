"""How large numbers are, as far as sums of their products go."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Sizes(NamedTuple):
    """Of rows of numbers: the largest |mean|, the largest root mean square, the length of a row."""

    mean: float
    rms: float
    length: int

    @classmethod
    def of(cls, sums: Tensor, length: int) -> Sizes:
        """From sums and sums of squares of rows, (row, 2): exact, so they do not depend on threads or kernels."""
        if not sums.numel() or not length:
            return cls(0.0, 0.0, 0)
        mean, square = sums.abs().amax(0).tolist()
        return cls(mean / length, math.sqrt(square / length), length)

    def times(self, factor: float) -> Sizes:
        return Sizes(self.mean * factor, self.rms * factor, self.length)
