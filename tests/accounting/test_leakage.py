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


def information(points: list[tuple[tuple[float, ...], float]], data: torch.Tensor, noise_std: float) -> float:
    """I(X; A1 X + noise) in nats for one row with unit noise and discrete X, by integrating h(Y) - h(noise)."""
    means = [(float(data @ torch.tensor(point, dtype=torch.float64)), p) for point, p in points]
    step = noise_std / 200
    grid = torch.arange(-12 * noise_std, 12 * noise_std, step, dtype=torch.float64)
    density = sum(p * torch.exp(-((grid - m) ** 2) / (2 * noise_std**2)) for m, p in means)
    density = density / (noise_std * math.sqrt(2 * math.pi))
    entropy = -float(torch.special.xlogy(density, density).sum()) * step
    return entropy - 0.5 * math.log(2 * math.pi * math.e * noise_std**2)


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


@pytest.mark.parametrize("inputs", [1, 2, 3])
@pytest.mark.parametrize("noise_std", [1.0, 3.0])
def test_no_discrete_inputs_leak_more_than_the_bound(inputs, noise_std):
    """Inputs at +-1, independent and all equal, against a numeric integral of the mutual information."""
    mixing = real_systematic(inputs, 1, 0, True).A
    for worker in range(mixing.workers):
        bound = coalition_bound(mixing, (worker,), bound=1.0, noise_std=noise_std)
        data, noise = blocks(mixing, (worker,))
        scaled = data[0] / abs(noise[0, 0])
        corners = list(product([1.0, -1.0], repeat=inputs))
        independent = [(corner, 1 / len(corners)) for corner in corners]
        alike = [((1.0,) * inputs, 0.5), ((-1.0,) * inputs, 0.5)]
        for points in (independent, alike):
            assert information(points, scaled, noise_std) <= bound + 1e-6


def test_the_bound_is_not_vacuous():
    """One row, one input at +-1, little noise: the bound is close to what really leaks, and a smaller one is false."""
    mixing = real_systematic(1, 1, 0, True).A
    bound = coalition_bound(mixing, (0,), bound=1.0, noise_std=3.0)
    leaked = information([((1.0,), 0.5), ((-1.0,), 0.5)], torch.ones(1, dtype=torch.float64), 3.0)
    assert 0.9 * bound < leaked <= bound


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
