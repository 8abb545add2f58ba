"""Statistical judges: each accepts samples of the right distribution and raises RejectedError for wrong ones.

A judge computes several statistics and names those that are too unlikely. Significance: every statistic rejects a right
sample with probability at most 1e-6 (a statistic made of many comparisons is corrected for their number, Bonferroni),
so a judge raises a false alarm less than once in 100,000 samples; and the tests' keys are fixed, so a sample that
passed once passes always. That each statistic has teeth is shown beside its use: the tests hand every judge generators
that are wrong in a known way and ask which statistic noticed.
"""

import math

import numpy as np
import torch
from scipy import stats

SIGNIFICANCE = 1e-6
RESIDUES = (*range(2, 17), 64, 256)
LAGS = 64
_SIDE = 32  # cells along one side of a square of neighbours


class RejectedError(AssertionError):
    """The sample does not have the distribution; the text names the statistics that say so."""


class Verdict:
    """Collects p-values; `give` raises RejectedError when one of them is below the significance."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._against: list[str] = []

    def impossible(self, statistic: str, found: bool) -> None:
        if found:
            self._against.append(f"{statistic} (impossible)")

    def weigh(self, statistic: str, *p_values: float) -> None:
        """The smallest of the p-values, corrected for how many there are."""
        p_value = min(p_values) * len(p_values)
        if not p_value >= SIGNIFICANCE:  # a NaN is a rejection
            self._against.append(f"{statistic} (p={p_value:.1e})")

    def give(self) -> None:
        if self._against:
            raise RejectedError(f"{self._subject}: {', '.join(self._against)}")


# --- whole samples ----------------------------------------------------------------------------------------------------
def uniform_integers(values, bound: int) -> None:
    """Independent and uniform on 0 .. bound - 1, in the order given.

    range, extremes, bins (up to 1000), residues (modulo 2..16, 64, 256), lags 1..64, neighbours (32 x 32 cells),
    collisions (holes raise them, and so does reuse), repeats (a run of values that comes twice).
    """
    values = integers(values)
    count = len(values)
    verdict = Verdict(f"{count} integers, uniform below {bound}")
    smallest, largest = int(values.min()), int(values.max())
    verdict.impossible("range", smallest < 0 or largest >= bound)
    verdict.weigh(
        "extremes", *(math.exp(count * math.log1p(-gap / bound)) for gap in (smallest, bound - 1 - largest) if gap >= 0)
    )
    verdict.weigh("bins", _uniform_bins(values, bound))
    verdict.weigh("residues", *_residues(values, bound))
    verdict.weigh("lags", *_lags(values))
    cells = _uniform_cells(values, bound, _SIDE)
    verdict.weigh("neighbours", _square(cells[0:-1:2], cells[1::2], uniform_shares(bound, _SIDE)))
    chance = 1 / bound
    verdict.weigh("collisions", _collisions(values, chance, chance**2))
    verdict.impossible("repeats", _repeats(values, math.log2(bound)))
    verdict.give()


def rounded_gaussian(values, std: float, mean: float = 0.0) -> None:
    """Independent integers round(mean + std z), z standard Gaussian, in the order given; std at least 1.

    cells (200 of about equal probability), kolmogorov, mean, variance (of std^2 + 1/12: sees 1 % of std in 300,000
    samples, 0.5 % in 10^7), kurtosis, tails (beyond 3 and 4 std, either side), residues (modulo 2..16, where std is at
    least twice that), lags 1..64, neighbours, collisions, repeats.
    """
    values = integers(values)
    count = len(values)
    verdict = Verdict(f"{count} rounded Gaussians of std {std:g}")
    edges, shares = _gaussian_cells(std, mean, 200)
    verdict.weigh("cells", chi_square(np.bincount(np.searchsorted(edges, values), minlength=len(shares)), shares))
    verdict.weigh("kolmogorov", _kolmogorov(values, std, mean))
    standard = (values - mean) / math.sqrt(std**2 + 1 / 12)
    verdict.weigh("mean", _normal_p(standard.mean() * math.sqrt(count)))
    verdict.weigh("variance", _normal_p(((standard**2).mean() - 1) * math.sqrt(count / 2)))
    verdict.weigh("kurtosis", _normal_p(_excess(standard) * math.sqrt(count / 24)))
    verdict.weigh("tails", *_tails(values, std, mean))
    moduli = [m for m in RESIDUES if m <= 16 and std >= 2 * m]  # then uniform up to e^-79
    if moduli:
        verdict.weigh(
            "residues", *(chi_square(np.bincount(values % m, minlength=m), np.full(m, 1 / m)) for m in moduli)
        )
    verdict.weigh("lags", *_lags(standard))
    edges, shares = _gaussian_cells(std, mean, _SIDE)
    cells = np.searchsorted(edges, values)
    verdict.weigh("neighbours", _square(cells[0:-1:2], cells[1::2], shares))
    pair, triple = 1 / (2 * math.sqrt(math.pi) * std), 1 / (2 * math.pi * math.sqrt(3) * std**2)
    verdict.weigh("collisions", _collisions(values, pair, triple))
    verdict.impossible("repeats", _repeats(values - values.min(), math.log2(std) + 1))
    verdict.give()


def independent_pair(left, right, bound: int) -> None:
    """Uniform on all pairs below bound: joint (64 x 64 cells), and the sum and the difference modulo the bound.

    Sees only coarse dependence; a coalition that knows its coefficients asks for more, see `uniform_integers` of the
    combinations that cancel noise.
    """
    left, right = integers(left), integers(right)
    verdict = Verdict(f"{len(left)} pairs, uniform below {bound}")
    side = 64
    shares = uniform_shares(bound, side)
    verdict.weigh("joint", _square(_uniform_cells(left, bound, side), _uniform_cells(right, bound, side), shares))
    verdict.weigh("sum", _uniform_bins((left + right) % bound, bound))
    verdict.weigh("difference", _uniform_bins((left - right) % bound, bound))
    verdict.give()


def same_distribution(left, right, bound: int) -> None:
    """Two samples of integers below bound, equally long, that one distribution could have made: bins and residues."""
    left, right = integers(left), integers(right)
    assert len(left) == len(right)
    verdict = Verdict(f"two samples of {len(left)} integers below {bound}")
    side = min(bound, 1000)
    verdict.weigh(
        "bins", two_samples(*(np.bincount(_uniform_cells(v, bound, side), minlength=side) for v in (left, right)))
    )
    verdict.weigh(
        "residues", *(two_samples(*(np.bincount(v % m, minlength=m) for v in (left, right))) for m in RESIDUES)
    )
    verdict.give()


def haar(matrices) -> None:
    """(sample, row, column): Haar-distributed orthogonal matrices.

    Every entry, also after fixed rotations from the left and from the right (the distribution is invariant): signs
    fair, mean 0, fourth moment 3 / (n (n + 2)), its square Beta(1/2, (n - 1) / 2). The determinant's sign is fair, and
    the trace has mean 0 and mean square 1.
    """
    matrices = np.asarray(matrices)
    count, rows, columns = matrices.shape
    assert rows == columns > 1
    verdict = Verdict(f"{count} orthogonal {rows} x {rows} matrices")
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(rows, rows)))[0]
    views = {"entries": matrices, "left": rotation @ matrices, "right": matrices @ rotation}
    fourth, eighth = _sphere_moment(rows, 4), _sphere_moment(rows, 8)
    for name, view in views.items():
        entries = view.reshape(count, -1)
        verdict.weigh(f"{name}: signs", *(_fair(int(n), count) for n in (entries > 0).sum(axis=0)))
        verdict.weigh(f"{name}: mean", *(_normal_p(z) for z in entries.mean(axis=0) * math.sqrt(count * rows)))
        scores = ((entries**4).mean(axis=0) - fourth) * math.sqrt(count / (eighth - fourth**2))
        verdict.weigh(f"{name}: fourth moment", *(_normal_p(z) for z in scores))
        law = stats.beta(0.5, (rows - 1) / 2).cdf
        verdict.weigh(f"{name}: squares", *(stats.kstest(column**2, law).pvalue for column in entries.T))
    verdict.weigh("determinant", _fair(int((np.linalg.det(matrices) > 0).sum()), count))
    trace = np.trace(matrices, axis1=1, axis2=2)
    verdict.weigh("trace", stats.ttest_1samp(trace, 0).pvalue, stats.ttest_1samp(trace**2, 1).pvalue)
    verdict.give()


# --- statistics -------------------------------------------------------------------------------------------------------
def integers(values) -> np.ndarray:
    """Flat int64; a value that is not an integer is an error of the test, or a hole in the promise."""
    flat = values.detach().reshape(-1).numpy() if isinstance(values, torch.Tensor) else np.asarray(values).reshape(-1)
    whole = flat.astype(np.int64)
    if not np.array_equal(whole, flat):
        raise RejectedError("values that are not integers")
    return whole


def uniform_shares(bound: int, cells: int) -> np.ndarray:
    """The probabilities of value * cells // bound for a uniform value below bound."""
    cells = min(cells, bound)
    starts = np.array([-(-cell * bound // cells) for cell in range(cells + 1)], dtype=np.float64)
    return np.diff(starts) / bound


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    """p-value of counts against probabilities. With 30 cells or more counts that are too even are unlikely as well."""
    if len(counts) != len(shares):
        return 0.0
    expected = shares * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    law = stats.chi2(len(shares) - 1)
    above = float(law.sf(statistic))
    return above if len(shares) < 30 else 2 * min(above, float(law.cdf(statistic)))


def two_samples(left: np.ndarray, right: np.ndarray) -> float:
    """p-value of two equally large histograms having one source; upper tail."""
    total = left + right
    used = total > 0
    if used.sum() < 2:
        return 1.0
    statistic = float(((left - right)[used] ** 2 / total[used]).sum())
    return float(stats.chi2.sf(statistic, used.sum() - 1))


def _normal_p(z: float) -> float:
    return 2 * float(stats.norm.sf(abs(z)))


def _excess(values: np.ndarray) -> float:
    squares = (values - values.mean()) ** 2
    return float((squares**2).mean() / squares.mean() ** 2 - 3) if squares.any() else math.nan


def _fair(heads: int, count: int) -> float:
    return float(stats.binomtest(heads, count).pvalue)


def _uniform_cells(values: np.ndarray, bound: int, cells: int) -> np.ndarray:
    return values * min(cells, bound) // bound


def _uniform_bins(values: np.ndarray, bound: int) -> float:
    shares = uniform_shares(bound, 1000)
    cells = np.clip(_uniform_cells(values, bound, 1000), 0, len(shares) - 1)
    return chi_square(np.bincount(cells, minlength=len(shares)), shares)


def _residues(values: np.ndarray, bound: int) -> list[float]:
    found = []
    for modulus in (m for m in RESIDUES if m <= bound):
        shares = np.array([(bound - residue + modulus - 1) // modulus for residue in range(modulus)]) / bound
        found.append(chi_square(np.bincount(values % modulus, minlength=modulus), shares))
    return found or [1.0]


def _lags(values: np.ndarray) -> list[float]:
    """Serial correlation. One AES block is 4 words of 32 bits, so a stuck counter shows at lag 4 or 2."""
    centred = values - values.mean()
    power = float(centred @ centred)
    if not power:
        return [0.0]
    scores = (float(centred[lag:] @ centred[:-lag]) / power * math.sqrt(len(values)) for lag in range(1, LAGS + 1))
    return [_normal_p(score) for score in scores]


def _square(left: np.ndarray, right: np.ndarray, shares: np.ndarray) -> float:
    """Chi-square of pairs of cells against the product of their probabilities."""
    side = len(shares)
    left, right = np.clip(left, 0, side - 1), np.clip(right, 0, side - 1)
    return chi_square(np.bincount(left * side + right, minlength=side**2), np.outer(shares, shares).reshape(-1))


def _collisions(values: np.ndarray, pair: float, triple: float) -> float:
    """How many pairs of samples are equal, where `pair` and `triple` are the chances that two and three are equal.

    Normal approximation, which holds for sparse samples; 1.0 (no opinion) where a value is expected more than once, or
    fewer than 50 equal pairs are.
    """
    count = len(values)
    pairs = count * (count - 1) / 2
    if count * pair > 1 or pairs * pair < 50:
        return 1.0
    ordered = np.sort(values)
    runs = np.diff(np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True]))))
    equal = float((runs * (runs - 1) // 2).sum())
    # Equal pairs that share a sample are dependent unless all values are equally likely (then triple == pair^2).
    variance = pairs * (pair - pair**2) + pairs * 2 * (count - 2) * (triple - pair**2)
    return _normal_p((equal - pairs * pair) / math.sqrt(variance))


def _repeats(values: np.ndarray, bits: float) -> bool:
    """Whether more than one run of values, long enough to be unique, comes twice (64-bit hashes of every run)."""
    length = math.ceil(80 / bits)
    factors = np.random.default_rng(2).integers(1, 2**63, size=length, dtype=np.uint64)
    words = values.astype(np.uint64)
    hashes = np.zeros(len(words) - length + 1, dtype=np.uint64)
    for place, factor in enumerate(factors):
        hashes += words[place : place + len(hashes)] * factor
    hashes.sort()
    return int((hashes[1:] == hashes[:-1]).sum()) > 1


def _gaussian_cells(std: float, mean: float, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges at half-integers and the exact probabilities between them."""
    wanted = mean + std * stats.norm.ppf(np.arange(1, cells) / cells)
    edges = np.unique(np.floor(wanted)) + 0.5
    cumulative = np.concatenate(([0.0], stats.norm.cdf((edges - mean) / std), [1.0]))
    return edges, np.diff(cumulative)


def _kolmogorov(values: np.ndarray, std: float, mean: float) -> float:
    """Against the exact steps of the rounded Gaussian; the p-value is an upper bound, as always for steps."""
    ordered = np.sort(values)
    count = len(ordered)
    ranks = np.arange(count + 1) / count
    above = (ranks[1:] - stats.norm.cdf((ordered + 0.5 - mean) / std)).max()
    below = (stats.norm.cdf((ordered - 0.5 - mean) / std) - ranks[:-1]).max()
    return float(stats.kstwobign.sf(max(above, below) * math.sqrt(count)))


def _tails(values: np.ndarray, std: float, mean: float) -> list[float]:
    found = []
    for limit in (3, 4):
        high, low = math.ceil(mean + limit * std), math.floor(mean - limit * std)
        chances = stats.norm.sf((high - 0.5 - mean) / std), stats.norm.cdf((low + 0.5 - mean) / std)
        for beyond, chance in zip((int((values >= high).sum()), int((values <= low).sum())), chances, strict=True):
            law = stats.binom(len(values), chance)
            found.append(2 * float(min(law.cdf(beyond), law.sf(beyond - 1), 0.5)))
    return found


def _sphere_moment(dimension: int, power: int) -> float:
    """The mean of an entry of a random unit vector, to an even power."""
    return math.prod(range(1, power, 2)) / math.prod(dimension + step for step in range(0, power, 2))
