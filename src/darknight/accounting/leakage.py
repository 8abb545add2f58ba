"""Leakage of Real shares to a coalition, in nats a feature.

    I(X_1..X_K; shares_S) <= 1/2 log det(I + (sigma^2 A2 A2^T)^-1 A1 Sigma_X A1^T)

Departs from the paper's Theorem 2, whose condition is too weak. Over features, and over every sending of the same
example (layers, steps, epochs, re-maskings, recomputation), bounds add: accounting.accountant does. In the field the
bound for shares is zero.

Guarantees: an upper bound of the mutual information for inputs within +-C1 under Gaussian noise (contract tests:
    tests/accounting/test_leakage.py::test_no_gaussian_inputs_leak_more_than_the_bound,
    tests/accounting/test_leakage.py::test_no_discrete_inputs_leak_more_than_the_bound).
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

Coalition = tuple[int, ...]  # seats of the scheme, in order


class Dependence(Enum):
    """What is known of the inputs of one virtual batch."""

    UNKNOWN = "unknown"
    UNCORRELATED = "uncorrelated"


def in_bits(nats: float) -> float:
    """
    >>> round(in_bits(1.0), 4)
    1.4427
    """
    return nats / math.log(2)


def gaussian_information(data: Tensor, noise: Tensor, covariance: Tensor, noise_std: float) -> float:
    """1/2 log det(I + (sigma^2 A2 A2^T)^-1 A1 Sigma A1^T): exact for Gaussian inputs, an upper bound for all others.

    data A1 (worker, input), noise A2 (worker, noise row), Sigma (input, input). Infinite for more workers than noise
    rows, or any others whose noise cancels.
    """
    return float(_information(data[None], noise[None], covariance, noise_std)[0])


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
    return float(_bounds(mixing, [tuple(coalition)], bound, noise_std, dependence)[0])


def coalition_bounds(
    mixing: Mixing, *, bound: float, noise_std: float, dependence: Dependence = Dependence.UNKNOWN
) -> dict[Coalition, float]:
    """`coalition_bound` of every coalition of M workers."""
    everyone = list(combinations(range(mixing.workers), mixing.colluders))
    return dict(zip(everyone, _bounds(mixing, everyone, bound, noise_std, dependence).tolist(), strict=True))


def worst_coalition(
    mixing: Mixing, *, bound: float, noise_std: float, dependence: Dependence = Dependence.UNKNOWN
) -> tuple[Coalition, float]:
    """The coalition of M workers that learns most, and its bound."""
    bounds = coalition_bounds(mixing, bound=bound, noise_std=noise_std, dependence=dependence)
    coalition = max(bounds, key=lambda seats: (bounds[seats], seats))
    return coalition, bounds[coalition]


def _bounds(
    mixing: Mixing, coalitions: Sequence[Coalition], bound: float, noise_std: float, dependence: Dependence
) -> Tensor:
    """(coalition), for coalitions of one size."""
    chosen = torch.tensor(coalitions)
    data = torch.tensor([[float(value) for value in row] for row in mixing.data], dtype=torch.float64)[chosen]
    noise = torch.tensor(mixing.noise, dtype=torch.float64)[chosen] * mixing.unit
    one = torch.eye(mixing.inputs, dtype=torch.float64)
    if dependence is Dependence.UNCORRELATED:
        return _information(data, noise, bound**2 * one, noise_std)
    touched = (data != 0).any(1).sum(1)
    wide = _information(data, noise, touched[:, None, None] * bound**2 * one, noise_std)
    whitened = _whitened(data, noise)
    trace = (whitened.mT @ whitened).abs().sum((1, 2)) * (bound / noise_std) ** 2
    rows = chosen.shape[1]
    return torch.minimum(wide, 0.5 * rows * torch.log1p(trace / rows))


def _information(data: Tensor, noise: Tensor, covariance: Tensor, noise_std: float) -> Tensor:
    """The same for many coalitions: data (coalition, worker, input), noise (coalition, worker, noise row)."""
    whitened = _whitened(data, noise)
    cancels = whitened.isinf().any(2).any(1)
    whitened = whitened.masked_fill(cancels[:, None, None], 0.0)
    signal = torch.linalg.eigvalsh(whitened @ covariance @ whitened.mT) / noise_std**2
    # log1p: a log det of I plus 1e-13 would be rounded away.
    return (0.5 * torch.log1p(signal.clamp_min(0)).sum(1)).masked_fill(cancels, math.inf)


def _whitened(data: Tensor, noise: Tensor) -> Tensor:
    """L^-1 A1 with L L^T = A2 A2^T; infinite where the noise of a coalition cancels."""
    cancels = torch.linalg.matrix_rank(noise) < noise.shape[1]
    gram = noise @ noise.mT
    gram[cancels] = torch.eye(noise.shape[1], dtype=torch.float64)
    whitened: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), data, upper=False)
    return whitened.masked_fill(cancels[:, None, None], math.inf)
