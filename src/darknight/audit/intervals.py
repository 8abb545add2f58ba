"""95 % intervals: by resampling whole images, whose pixels are not independent, and Wilson's for counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_DRAWS = 500
_TAIL = 0.025
_NORMAL = 1.959964

_Statistic = Callable[[Tensor], Tensor]  # (draw, column sum) -> (draw,)


@dataclass(frozen=True)
class Interval:
    """A number and where it lies with 95 % confidence."""

    value: float
    low: float
    high: float


def correlation_interval(left: Tensor, right: Tensor, *, clusters: Tensor | None = None, seed: int) -> Interval:
    """Pearson's correlation over all entries of (row, *feature), 0 where one side is constant.

    clusters: (row,) numbers of what is resampled together, such as the image that several shares belong to; None if
    each row stands for itself.
    """
    a, b = (side.flatten(1).to(torch.float64) for side in (left, right))
    a, b = a - a.mean(), b - b.mean()  # changes no correlation, and keeps the sums small
    count = torch.full((len(a),), float(a.shape[1]), dtype=torch.float64)
    sums = [count, a.sum(1), b.sum(1), a.square().sum(1), b.square().sum(1), (a * b).sum(1)]
    return _resampled(torch.stack(sums, dim=1), _correlations, clusters, seed)


def mean_interval(values: Tensor, *, clusters: Tensor | None = None, seed: int) -> Interval:
    """The mean of (row,) numbers."""
    rows = torch.stack([torch.ones(len(values), dtype=torch.float64), values.to(torch.float64)], dim=1)
    return _resampled(rows, lambda sums: sums[:, 1] / sums[:, 0], clusters, seed)


def share_interval(hits: int, trials: int) -> Interval:
    """Wilson's interval for the share of `trials` that were `hits`: never empty, also at none or all.

    >>> found = share_interval(0, 100)
    >>> found.low, round(found.high, 3)
    (0.0, 0.037)
    """
    share, z = hits / trials, _NORMAL**2 / trials
    centre = (share + z / 2) / (1 + z)
    half = math.sqrt(z * (share * (1 - share) + z / 4)) / (1 + z)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Interval(share, 0.0 if hits == 0 else low, 1.0 if hits == trials else high)


def _resampled(rows: Tensor, statistic: _Statistic, clusters: Tensor | None, seed: int) -> Interval:
    """The percentile bootstrap of a statistic of column sums."""
    if clusters is not None:
        _, index = torch.unique(clusters, return_inverse=True)
        rows = torch.zeros(int(index.max()) + 1, rows.shape[1], dtype=rows.dtype).index_add_(0, index, rows)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(rows), (_DRAWS, len(rows)), generator=generator)
    times = torch.zeros(_DRAWS, len(rows), dtype=rows.dtype).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=rows.dtype)
    )
    value = float(statistic(rows.sum(0, keepdim=True)))
    repeated = statistic(times @ rows)
    low, high = (float(edge) for edge in repeated.quantile(torch.tensor([_TAIL, 1 - _TAIL], dtype=rows.dtype)))
    return Interval(value, min(low, value), max(high, value))


def _correlations(sums: Tensor) -> Tensor:
    count, a, b, aa, bb, ab = sums.unbind(1)
    scale = ((aa - a * a / count).clamp_min(0) * (bb - b * b / count).clamp_min(0)).sqrt()
    return torch.where(scale > 0, (ab - a * b / count) / scale, 0.0).clamp(-1.0, 1.0)
