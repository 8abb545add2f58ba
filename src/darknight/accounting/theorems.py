"""The paper's lemmas and theorems as it states them, for comparison. The bounds that hold are in accounting.leakage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from darknight.coding import Mixing


def entropy(distribution: Mapping[int, float]) -> float:
    """-sum p log p of a distribution over integers, in nats."""
    return -sum(p * math.log(p) for p in distribution.values() if p > 0)


def lemma_1(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[float, float]:
    """H(X + Y) and max(H(X), H(Y)) for independent X, Y over the integers; the first is never smaller.

    >>> die = {face: 1 / 6 for face in range(1, 7)}
    >>> of_sum, largest = lemma_1(die, die)
    >>> round(of_sum, 3), round(largest, 3)
    (2.27, 1.792)
    """
    total: dict[int, float] = {}
    for x, p in first.items():
        for y, q in second.items():
            total[x + y] = total.get(x + y, 0.0) + p * q
    return entropy(total), max(entropy(first), entropy(second))


def lemma_2(variances: Sequence[float], noise_std: float) -> tuple[float, float]:
    """sum 1/2 log(1 + Var / sigma^2) and its upper bound sum Var / (2 sigma^2): the Gaussian channel (display 18)."""
    exact = sum(0.5 * math.log1p(variance / noise_std**2) for variance in variances)
    return exact, sum(variance / (2 * noise_std**2) for variance in variances)


def theorem_1(inputs: int, bound: float, ratio: float, noise_std: float) -> float:
    """K C1^2 ratio / (2 sigma^2) nats a scalar, ratio = max|alpha|^2 / min|alpha|^2 (display 11).

    It is the case M=1 of the dense code and hides the assumption that inputs are independent. The paper's own table
    prints exactly twice this value:

    >>> theorem_1(inputs=2, bound=1.0, ratio=10.0, noise_std=2e4)
    2.5e-08
    """
    return inputs * bound**2 * ratio / (2 * noise_std**2)


def theorem_2(variances: Sequence[float], column_norm: float, noise_std: float) -> float:
    """sum Var / (C sigma^2) nats (display 20), as printed: C unsquared and no 1/2.

    Its condition (full rank, noise columns of norm at least C) is too weak, so this is not a bound: nearly parallel
    noise rows meet it and leak nats. See tests/accounting/vectors.json for the counterexample.
    """
    return sum(variances) / (column_norm * noise_std**2)


def papers_bound(mixing: Mixing, *, bound: float, noise_std: float) -> float:
    """What the paper states for these coefficients, in nats a scalar: Theorem 1 for one colluder, Theorem 2 for more.

    Ratio: the largest coefficient of an input over the smallest of the noise, which is what the proof of Theorem 1
    uses. C: the smallest norm of a worker's noise coefficients, a column in the paper's order of axes.
    """
    norms = [mixing.unit * math.sqrt(sum(value**2 for value in row)) for row in mixing.noise]
    if mixing.colluders > 1:
        return theorem_2([bound**2] * mixing.inputs, min(norms), noise_std)
    largest = max(abs(float(value)) for row in mixing.data for value in row)
    return theorem_1(mixing.inputs, bound, (largest / min(norms)) ** 2, noise_std)
