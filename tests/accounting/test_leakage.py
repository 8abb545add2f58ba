"""The coalition bound is an upper bound: against exact Gaussian information and against numeric integrals."""

import math
from itertools import combinations, product

import pytest
import torch

from darknight.accounting import Dependence, coalition_bound, gaussian_information, worst_coalition
from darknight.coding import Mixing, Scheme, draw_code
from darknight.coding.systematic import real_systematic
from darknight.randomness import Randomness

CODES = [(1, 1, 0), (3, 1, 1), (4, 1, 0), (2, 2, 0), (3, 2, 1), (2, 3, 0)]


def blocks(mixing: Mixing, coalition: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.tensor([[float(value) for value in mixing.data[j]] for j in coalition], dtype=torch.float64)
    return data, torch.tensor([mixing.noise[j] for j in coalition], dtype=torch.float64) * mixing.unit


def whitened(mixing: Mixing, coalition: tuple[int, ...]) -> torch.Tensor:
    """(worker, input): what the coalition sees of the inputs, in coordinates where its noise is sigma times white."""
    data, noise = blocks(mixing, coalition)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(noise @ noise.T), data, upper=False)


def information(points: list[tuple[tuple[float, ...], float]], seen: torch.Tensor, noise_std: float) -> float:
    """I(X; seen X + noise) in nats for discrete X, by quadrature of h(Y) - h(noise) over all coordinates of Y."""
    means = [(seen @ torch.tensor(point, dtype=torch.float64), p) for point, p in points]
    step, reach = noise_std / 16, 8 * noise_std + max(float(mean.abs().max()) for mean, _ in means)
    axis = torch.arange(-reach, reach, step, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(*[axis] * len(seen), indexing="ij"), -1)
    density = sum(p * torch.exp(-((grid - mean) ** 2).sum(-1) / (2 * noise_std**2)) for mean, p in means)
    density = density / (2 * math.pi * noise_std**2) ** (len(seen) / 2)
    entropy = -float(torch.special.xlogy(density, density).sum()) * step ** len(seen)
    return entropy - 0.5 * len(seen) * math.log(2 * math.pi * math.e * noise_std**2)


def at_the_bound(inputs: int) -> list[list[tuple[tuple[float, ...], float]]]:
    """Distributions of inputs at +-1: independent, and every way of being the same up to signs."""
    corners = list(product([1.0, -1.0], repeat=inputs))
    tied = [[(corner, 0.5), (tuple(-value for value in corner), 0.5)] for corner in corners[: len(corners) // 2]]
    return [[(corner, 1 / len(corners)) for corner in corners], *tied]


@pytest.mark.parametrize(("inputs", "colluders", "spares"), CODES)
@pytest.mark.parametrize("noise_std", [1.5, 30.0])
def test_no_gaussian_inputs_leak_more_than_the_bound(inputs, colluders, spares, noise_std):
    """Any covariance with variances up to C1^2, perfectly correlated ones included."""
    torch.manual_seed(inputs)
    code = real_systematic(inputs, colluders, spares, True)
    for mixing in code.masking:
        for coalition in combinations(range(mixing.workers), colluders):
            bound = coalition_bound(mixing, coalition, bound=2.0, noise_std=noise_std)
            data, noise = blocks(mixing, coalition)
            for signs in product([1.0, -1.0], repeat=inputs):
                direction = torch.tensor(signs, dtype=torch.float64)[:, None]
                assert gaussian_information(data, noise, 4.0 * direction @ direction.T, noise_std) <= bound + 1e-9
            spread = torch.randn(inputs, inputs, dtype=torch.float64)
            spread *= 2.0 / spread.norm(dim=1, keepdim=True)  # unit-diagonal correlation, times C1^2
            assert gaussian_information(data, noise, spread @ spread.T, noise_std) <= bound + 1e-9
            free = coalition_bound(
                mixing, coalition, bound=2.0, noise_std=noise_std, dependence=Dependence.UNCORRELATED
            )
            exact = gaussian_information(data, noise, 4.0 * torch.eye(inputs, dtype=torch.float64), noise_std)
            assert free == pytest.approx(exact)
            assert free <= bound + 1e-9


def some_covariance(inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Variances up to 1, any correlations: a random factor of any rank, its rows of length at most 1."""
    rank = int(torch.randint(1, inputs + 1, (), generator=generator))
    factor = torch.randn(inputs, rank, generator=generator, dtype=torch.float64)
    lengths = torch.rand(inputs, 1, generator=generator, dtype=torch.float64).sqrt()
    factor *= lengths / factor.norm(dim=1, keepdim=True)
    return factor @ factor.T


def drawn(inputs, colluders, generator):
    """Coefficients as nobody would choose them: the bound must hold for those too."""
    data = torch.randn(colluders + 3, inputs, generator=generator, dtype=torch.float64)
    noise = torch.randint(-9, 10, (colluders + 3, colluders), generator=generator)
    return Mixing(tuple(map(tuple, data.tolist())), tuple(map(tuple, noise.tolist())), (), unit=0.3)


def test_random_inputs_of_random_coalitions_never_exceed_it(full, tally):
    generator = torch.Generator().manual_seed(11)
    mixings = [mixing for shape in CODES for mixing in real_systematic(*shape, True).masking]
    mixings += [draw_code(Scheme.paper(), Randomness(bytes(32)).fresh()).A]
    mixings += [drawn(inputs, colluders, generator) for inputs in (2, 5) for colluders in (1, 2, 3)]
    closest, count = 0.0, 20_000 if full else 1_000
    for _ in range(count):
        mixing = mixings[int(torch.randint(len(mixings), (), generator=generator))]
        coalition = tuple(torch.randperm(mixing.workers, generator=generator)[: mixing.colluders].tolist())
        bound, noise_std = (float(torch.rand((), generator=generator)) * factor + 0.5 for factor in (5, 100))
        allowed = coalition_bound(mixing, coalition, bound=bound, noise_std=noise_std)
        covariance = bound**2 * some_covariance(mixing.inputs, generator)
        exact = gaussian_information(*blocks(mixing, coalition), covariance, noise_std)
        assert exact <= allowed * (1 + 1e-9)
        if 0 < allowed < math.inf:
            closest = max(closest, exact / allowed)
    assert closest > 0.9  # some come close: it is not just large
    tally("Gaussian inputs against the bound", {"coalitions": count})


def test_a_bound_for_independent_inputs_is_exceeded_by_others():
    """What Theorem 1 assumes in silence. The row that holds the sum of the inputs sees the same value K times."""
    mixing = real_systematic(3, 1, 0, True).A
    row = next(j for j, values in enumerate(mixing.data) if all(values))
    too_small = coalition_bound(mixing, (row,), bound=1.0, noise_std=2.0, dependence=Dependence.UNCORRELATED)
    signs = tuple(float(value) for value in mixing.data[row])
    tied = [(signs, 0.5), (tuple(-value for value in signs), 0.5)]
    leaked = information(tied, whitened(mixing, (row,)), 2.0)
    assert leaked > 2 * too_small
    assert leaked <= coalition_bound(mixing, (row,), bound=1.0, noise_std=2.0)


@pytest.mark.parametrize(("inputs", "colluders"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("noise_std", [1.0, 3.0])
def test_no_discrete_inputs_leak_more_than_the_bound(inputs, colluders, noise_std):
    """Inputs at +-1 against a numeric integral of the mutual information, for one row and for two.

    And it is tight: for every coalition that sees data some such inputs leak at least 0.8 of its bound.
    """
    for mixing in real_systematic(inputs, colluders, 0, True).masking:
        for coalition in combinations(range(mixing.workers), colluders):
            bound, seen = (
                coalition_bound(mixing, coalition, bound=1.0, noise_std=noise_std),
                whitened(mixing, coalition),
            )
            leaks = [information(points, seen, noise_std) for points in at_the_bound(inputs)]
            assert max(leaks) <= bound + 1e-9
            assert max(leaks) >= 0.8 * bound - 1e-9


def test_the_bound_is_not_vacuous():
    """One row, one input at +-1, little noise: it is what really leaks up to 0.02 %, and a smaller one is false."""
    mixing = real_systematic(1, 1, 0, True).A
    bound = coalition_bound(mixing, (0,), bound=1.0, noise_std=3.0)
    leaked = information([((1.0,), 0.5), ((-1.0,), 0.5)], whitened(mixing, (0,)), 3.0)
    assert 0.9998 * bound < leaked <= bound


def test_tiny_bounds_are_not_rounded_away():
    """log det of a matrix that is the identity up to 1e-13."""
    mixing = real_systematic(2, 2, 0, True).A
    one, other = (worst_coalition(mixing, bound=1.0, noise_std=std)[1] * std**2 for std in (1e3, 4e6))
    assert other == pytest.approx(one, rel=1e-5)
    assert worst_coalition(mixing, bound=1.0, noise_std=4e6)[1] > 0


def test_the_stated_bound_holds_for_every_row_of_the_systematic_code():
    for inputs in range(1, 9):
        for mixing in real_systematic(inputs, 1, 1, True).masking:
            assert worst_coalition(mixing, bound=1.0, noise_std=2e4)[1] <= 1 / (2 * 2e4**2)


def test_the_worst_coalition_is_the_worst():
    scheme = Scheme.paper()
    mixing = draw_code(scheme, Randomness(bytes(32)).fresh()).A
    coalition, nats = worst_coalition(mixing, bound=1.0, noise_std=2e4)
    others = [coalition_bound(mixing, (j,), bound=1.0, noise_std=2e4) for j in range(mixing.workers)]
    assert nats == max(others) == others[coalition[0]]
    assert nats > 1 / (2 * 2e4**2)  # dense rows hold more than one input under less noise


@pytest.mark.parametrize(("inputs", "colluders"), [(2, 1), (3, 1), (2, 2), (4, 2), (2, 3)])
def test_more_colluders_than_the_scheme_allows_are_not_bounded(inputs, colluders):
    """A data worker with all carriers of r, for one: the noise cancels, and the bound says so."""
    for mixing in real_systematic(inputs, colluders, 0, True).masking:
        for coalition in combinations(range(mixing.workers), colluders + 1):
            assert coalition_bound(mixing, coalition, bound=1.0, noise_std=2e4) == math.inf
