"""Leakage of Real shares to a coalition, in nats a feature.

    I(X_1..X_K; shares_S) <= 1/2 log det(I + (sigma^2 A2 A2^T)^-1 A1 Sigma_X A1^T)

Departs from the paper's Theorem 2, whose condition is too weak. Over features, and over every sending of the same
example (layers, steps, epochs, re-maskings, recomputation), bounds add. In the field the bound for shares is zero.

Guarantees: an upper bound of the mutual information for inputs within +-C1 under Gaussian noise (contract test:
    tests/accounting/test_leakage.py).
Assumes: noise as coding.real makes it; the dependence between inputs that is stated, by default none is assumed.
Leaks: nothing; these are numbers about public parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from itertools import combinations

import torch
from torch import Tensor

from darknight.coding import Mixing


class Dependence(Enum):
    """What is known of the inputs of one virtual batch."""

    UNKNOWN = "unknown"
    UNCORRELATED = "uncorrelated"


def gaussian_information(data: Tensor, noise: Tensor, covariance: Tensor, noise_std: float) -> float:
    """1/2 log det(I + (sigma^2 A2 A2^T)^-1 A1 Sigma A1^T): exact for Gaussian inputs, an upper bound for all others.

    data A1 (worker, input), noise A2 (worker, noise row), Sigma (input, input). Infinite for more workers than noise
    rows, or any others whose noise cancels.
    """
    if torch.linalg.matrix_rank(noise) < len(noise):
        return math.inf
    signal = torch.linalg.solve(noise_std**2 * noise @ noise.T, data @ covariance @ data.T)
    return 0.5 * float(torch.linalg.slogdet(torch.eye(len(data), dtype=data.dtype) + signal).logabsdet)


def coalition_bound(
    mixing: Mixing,
    coalition: Sequence[int],
    *,
    bound: float,
    noise_std: float,
    dependence: Dependence = Dependence.UNKNOWN,
) -> float:
    """Nats a feature that the workers of `coalition` learn together from one masking of inputs within +-`bound`.

    Uncorrelated inputs have covariance at most C1^2 I. When nothing is known it is at most k C1^2 I, k the number of
    inputs in the coalition's shares; and with Q = A1^T (A2 A2^T)^-1 A1 the trace is at most C1^2 sum |Q_ij| / sigma^2,
    which M/2 log(1 + trace / M) turns into a bound that is tighter for one row. The smaller of the two is returned.
    """
    data = torch.tensor([[float(value) for value in mixing.data[j]] for j in coalition], dtype=torch.float64)
    noise = torch.tensor([mixing.noise[j] for j in coalition], dtype=torch.float64) * mixing.unit
    one = torch.eye(data.shape[1], dtype=torch.float64)
    if dependence is Dependence.UNCORRELATED:
        return gaussian_information(data, noise, bound**2 * one, noise_std)
    touched = int((data != 0).any(0).sum())
    wide = gaussian_information(data, noise, touched * bound**2 * one, noise_std)
    rows = len(coalition)
    if math.isinf(wide):
        return wide
    trace = float((data.T @ torch.linalg.solve(noise @ noise.T, data)).abs().sum()) * (bound / noise_std) ** 2
    return min(wide, 0.5 * rows * math.log1p(trace / rows))


def worst_coalition(
    mixing: Mixing, *, bound: float, noise_std: float, dependence: Dependence = Dependence.UNKNOWN
) -> tuple[tuple[int, ...], float]:
    """The coalition of M workers that learns most, and its bound."""
    scored = [
        (coalition_bound(mixing, coalition, bound=bound, noise_std=noise_std, dependence=dependence), coalition)
        for coalition in combinations(range(mixing.workers), mixing.colluders)
    ]
    nats, coalition = max(scored)
    return coalition, nats
