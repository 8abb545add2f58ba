"""What is drawn from the keystream has exactly the distribution that privacy rests on.

Contract tests of darknight.randomness.distributions. Every statistical test is run both ways: our generator is
accepted, and generators that are wrong in a way people get wrong are rejected by the statistic that should notice.
Full counts: 10^7 samples; reduced: 3 * 10^5.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import stats

from darknight.coding import PRIME_25, PRIME_28
from darknight.errors import RandomnessError
from darknight.randomness import grid_gaussian, haar_orthogonal, random_signs, standard_normal, uniform_below
from randomness.holes import could_be_drawn, float32_reaches
from randomness.judges import RejectedError, chi_square, haar, integers, rounded_gaussian, uniform_integers
from randomness.streams import ReusedCounter, Scripted, generator

PAPER_STD = 2e4 * 2**9  # noise of 2e4 on a grid of 2^-9, in grid steps


@pytest.fixture(scope="module")
def samples(full) -> int:
    return 10_000_000 if full else 300_000


def fresh(label):
    return generator(label).fresh()


def seeded(seed=0):
    """torch's own generator, for wrong noise."""
    return torch.Generator().manual_seed(seed)


# --- uniform_below ----------------------------------------------------------------------------------------------------
BOUNDS = {"2^25-39": PRIME_25, "2^28-57": PRIME_28, "5": 5, "7": 7, "1000": 1000, "2": 2, "3*2^20": 3 << 20}


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_uniform_below_is_uniform_and_independent(bound, samples):
    uniform_integers(uniform_below(fresh(f"uniform/{bound}"), (samples,), bound), bound)


@pytest.mark.parametrize("bound", [2**31 - 1, 2**31, 2**31 + 1, 2**40 + 15])
def test_uniform_below_is_uniform_where_words_grow_to_64_bits(bound):
    values = uniform_below(fresh(f"uniform/{bound}"), (300_000,), bound)
    assert values.dtype == (torch.int32 if bound <= 2**31 else torch.int64)
    uniform_integers(values, bound)


def remainder(bound, bits):
    """Word modulo bound: small values come up more often."""
    return lambda count: uniform_below(fresh("remainder"), (count,), 1 << bits) % bound


def float32_made(bound):
    """Uniforms of 24 bits times the bound: odd residues are missing in the upper half, and more at 2^28."""
    return lambda count: (torch.rand(count, generator=seeded()) * bound).clamp_(max=bound - 1).to(torch.int64)


def reused(bound, period):
    return lambda count: uniform_below(ReusedCounter(fresh("reused"), period), (count,), bound)


def ordered_pairs(bound):
    return lambda count: uniform_below(fresh("ordered"), (count // 2, 2), bound).sort(dim=1).values


WRONG_UNIFORMS = {
    "remainder of 22 bits by 3*2^20": (3 << 20, remainder(3 << 20, 22), "bins"),
    "remainder of 10 bits by 1000": (1000, remainder(1000, 10), "bins"),
    "remainder of 3 bits by 5": (5, remainder(5, 3), "bins"),
    "remainder of 8 bits by 7": (7, remainder(7, 8), "bins"),
    "remainder of 25 bits by 2^25-2^20": ((1 << 25) - (1 << 20), remainder((1 << 25) - (1 << 20), 25), "bins"),
    "the largest value missing of 5": (5, lambda n: uniform_below(fresh("off"), (n,), 4), "extremes"),
    "the largest value missing of 1000": (1000, lambda n: uniform_below(fresh("off"), (n,), 999), "extremes"),
    "1 to 7 instead of 0 to 6": (7, lambda n: uniform_below(fresh("off"), (n,), 7) + 1, "range"),
    "1 to 999, zero missing": (1000, lambda n: uniform_below(fresh("off"), (n,), 999) + 1, "extremes"),
    "one bit too few": (PRIME_28, lambda n: uniform_below(fresh("short"), (n,), 1 << 27), "extremes"),
    "float32 at 2^25, low bit": (PRIME_25, float32_made(PRIME_25), "residues"),
    "float32 at 2^25, holes": (PRIME_25, float32_made(PRIME_25), "collisions"),
    "float32 at 2^28": (PRIME_28, float32_made(PRIME_28), "residues"),
    "one block repeated": (PRIME_25, reused(PRIME_25, 16), "lags"),
    "one block repeated, small bound": (5, reused(5, 16), "lags"),
    "counter restarted after 64 KiB": (PRIME_28, reused(PRIME_28, 1 << 16), "repeats"),
    "counter restarted after 512 KiB, bound 7": (7, reused(7, 1 << 19), "repeats"),
    "neighbours in order": (PRIME_25, ordered_pairs(PRIME_25), "neighbours"),
    "too even": (1000, lambda n: torch.arange(n) % 1000, "bins"),
}


@pytest.mark.parametrize(("bound", "wrong", "statistic"), WRONG_UNIFORMS.values(), ids=WRONG_UNIFORMS)
def test_wrong_uniforms_are_rejected(bound, wrong, statistic):
    with pytest.raises(RejectedError, match=statistic):
        uniform_integers(wrong(300_000), bound)


@pytest.mark.parametrize("bound", [2, 5, 7, 1000, PRIME_25, PRIME_28, 2**31 - 1, 2**31, 2**40 + 15, 2**62])
def test_uniform_below_reaches_zero_and_its_largest_value(bound):
    """At the real primes an off-by-one is too rare for statistics, so the words are chosen."""
    assert uniform_below(Scripted([0, bound - 1]), (2,), bound).tolist() == [0, bound - 1]


@pytest.mark.parametrize("bound", [5, 1000, PRIME_25, PRIME_28])
def test_a_value_out_of_range_is_replaced_by_the_next_words_and_never_reduced(bound):
    bits = (bound - 1).bit_length()
    high = 1 << bits  # a bit above the mask, which must be cut off
    largest = high - 1
    assert largest >= bound
    script = [high + 1, largest, 2, bound, largest, bound - 1, 4]
    assert uniform_below(Scripted(script), (4,), bound).tolist() == [1, 4, 2, bound - 1]


def test_a_bound_of_one_gives_zeros_and_an_empty_shape_gives_nothing():
    assert uniform_below(fresh("one"), (3, 4), 1).tolist() == [[0] * 4] * 3
    assert uniform_below(fresh("empty"), (0, 4), 1000).shape == (0, 4)


@pytest.mark.parametrize("bound", [0, -1, 2**62 + 1])
def test_an_impossible_bound_is_refused(bound):
    with pytest.raises(RandomnessError, match="uniform integers need"):
        uniform_below(fresh("bound"), (3,), bound)


# --- grid_gaussian ----------------------------------------------------------------------------------------------------
GAUSSIANS = [
    (PAPER_STD, 0.0),
    (1.0, 0.0),
    (3.7, 0.0),
    (3.7, 2.0),
    (1000.0, -12.0),
    (2.0**29.9, 0.0),  # the last without lower bits
    (2.0**30, 0.0),  # the first with them
    (2.0**33, 1e9),
    (1e3 * 2.0**39, 0.0),  # what grid_for chooses for noise_std=1000
    (1.5 * 2.0**47, 0.0),
    (1.75 * 2.0**47, 0.0),
    (2.0**51, 0.0),
]


@pytest.mark.parametrize(("std", "mean"), GAUSSIANS)
def test_grid_gaussian_is_a_rounded_gaussian(std, mean, samples, full):
    if std != PAPER_STD:
        samples = 3_000_000 if full else 300_000
    values = grid_gaussian(fresh(f"gaussian/{std}"), (samples,), std, mean)
    assert values.dtype == torch.int64
    rounded_gaussian(values, std, mean)


@pytest.mark.parametrize("std", [2.0**58, 1.5 * 2.0**57])
def test_the_largest_gaussians_are_gaussian_above_and_uniform_below(std):
    """Beyond 2^53 steps, which the judge cannot count, the upper and the lower bits are judged separately."""
    values = grid_gaussian(fresh(f"gaussian/{std}"), (300_000,), std)
    rounded_gaussian((values + (1 << 28)) >> 29, std / 2**29)
    uniform_integers(values & ((1 << 25) - 1), 1 << 25)
    for modulus in (3, 5, 7, 11):
        uniform_integers(values % modulus, modulus)


def test_grid_gaussian_is_centred_on_its_mean():
    for mean, centre in ((1e15, 10**15), (-(2.0**61), -(2**61)), (7.4, 7)):
        values = grid_gaussian(fresh("mean"), (300_000,), 1e6, mean)
        assert abs(float((values - centre).double().mean())) < 5 * 1e6 / math.sqrt(300_000)


def gaussian(std, mean=0.0):
    return lambda count: grid_gaussian(fresh("wrong gaussian"), (count,), std, mean)


def rounded_product(std):
    """round(std * z) in float64: beyond 2^44 there are few bits below the point, and ties go to even integers."""
    return lambda count: (standard_normal(fresh("product"), (count,)) * std).round()


def float32_noise(count, std=2e4, grid=2.0**9):
    """The obvious program: torch.randn in float32, scaled in float32, then put on the grid."""
    return (torch.randn(count, generator=seeded()) * std).double().mul_(grid).round_()


def from_few_uniforms(std, terms):
    """The sum of a few uniforms, an old recipe: the tails are thin or missing."""
    uniforms = uniform_below(fresh("few"), (terms, 300_000), 1 << 30).double() / 2**30
    return ((uniforms.sum(0) - terms / 2) * std / math.sqrt(terms / 12)).round()


WRONG_GAUSSIANS = {
    "std 1 % too large": (PAPER_STD, gaussian(PAPER_STD * 1.01), "variance"),
    "std 1 % too small": (PAPER_STD, gaussian(PAPER_STD * 0.99), "variance"),
    "mean off by 1 % of std": (PAPER_STD, gaussian(PAPER_STD, PAPER_STD / 100), "mean"),
    "float64 product, even integers preferred": (2.0**47, rounded_product(2.0**47), "residues"),
    "float64 product, multiples of 7 preferred": (
        1.75 * 2.0**47,
        lambda n: (standard_normal(fresh("7"), (2_000_000,)) * (1.75 * 2.0**47) + 0.5).floor(),
        "residues",
    ),
    "float32, holes": (PAPER_STD, lambda _: float32_noise(1_000_000), "collisions"),
    "float32, low bits": (2.0**33, lambda n: float32_noise(n, 2.0**33, 1.0), "residues"),
    "one block repeated": (PAPER_STD, lambda n: grid_gaussian(ReusedCounter(fresh("a"), 16), (n,), PAPER_STD), "lags"),
    "counter restarted": (
        PAPER_STD,
        lambda n: grid_gaussian(ReusedCounter(fresh("b"), 1 << 19), (n,), PAPER_STD),
        "repeats",
    ),
    "sum of four uniforms": (PAPER_STD, lambda _: from_few_uniforms(PAPER_STD, 4), "tails"),
    "sum of twelve uniforms": (PAPER_STD, lambda _: from_few_uniforms(PAPER_STD, 12), "kurtosis"),
    "uniform": (PAPER_STD, lambda n: uniform_below(fresh("u"), (n,), int(PAPER_STD * 3)) - PAPER_STD, "kolmogorov"),
    "rounded down": (3.7, lambda n: (standard_normal(fresh("floor"), (n,)) * 3.7).floor(), "cells"),
    "even values only": (1000.0, lambda n: gaussian(500.0)(n) * 2, "residues"),
    "neighbours in order": (1000.0, lambda n: gaussian(1000.0)(n).view(-1, 2).sort(dim=1).values, "neighbours"),
}


@pytest.mark.parametrize(("std", "wrong", "statistic"), WRONG_GAUSSIANS.values(), ids=WRONG_GAUSSIANS)
def test_wrong_gaussians_are_rejected(std, wrong, statistic):
    with pytest.raises(RejectedError, match=statistic):
        rounded_gaussian(wrong(300_000), std)


@pytest.mark.full
@pytest.mark.parametrize("scale", [0.995, 1.005])
def test_a_std_off_by_half_a_percent_is_rejected_at_the_full_count(scale):
    with pytest.raises(RejectedError, match="variance"):
        rounded_gaussian(gaussian(PAPER_STD * scale)(10_000_000), PAPER_STD)


def test_gaussians_that_are_not_integers_are_rejected():
    with pytest.raises(RejectedError, match="not integers"):
        rounded_gaussian(standard_normal(fresh("not rounded"), (1000,)) * 100, 100.0)


def test_noise_made_in_float32_misses_one_grid_value_in_eight():
    """Every float32 z that could give a noise between 2^14 and 2^15, where float32 itself has the grid 2^-9."""
    std, low, high = 2e4, 2.0**14, 2.0**15
    ends = torch.tensor([low / std - 1e-5, high / std + 1e-5], dtype=torch.float32).view(torch.int32)
    z = torch.arange(int(ends[0]), int(ends[1]) + 1, dtype=torch.int32).view(torch.float32)
    noise = z * std
    reached = noise[(noise >= low) & (noise < high)].double().mul_(2.0**9)
    assert bool((reached == reached.round()).all())
    grid_values = int((high - low) * 2**9)
    missing = 1 - len(reached.unique()) / grid_values
    assert 1 / 8 < missing < 1 / 7


def test_our_noise_falls_where_float32_noise_cannot():
    """The same fact from a sample: float32 noise is always float32-reachable, ours is not once in eight."""
    ours = grid_gaussian(fresh("holes"), (100_000,), PAPER_STD).double() * 2.0**-9
    theirs = torch.randn(100_000, generator=seeded()) * 2e4
    middle = [noise[(noise.abs() >= 2**14) & (noise.abs() < 2**15)] for noise in (ours, theirs)]
    assert 0.11 < float((~float32_reaches(middle[0], 2e4)).double().mean()) < 0.14
    assert bool(float32_reaches(middle[1], 2e4).all())


@pytest.mark.parametrize(
    ("std", "mean"), [(PAPER_STD, 0.0), (1.0, 0.0), (1e3, 77.0), (2.0**33, -1e9), (2.0**48, 0.5), (2.0**58, 2.0**59)]
)
def test_grid_gaussian_reaches_every_integer(std, mean):
    """For integers within 8 std the words that give them are computed and tried: no holes, up to the largest std."""
    numbers = np.random.default_rng(3)
    furthest = int(8 * std)
    near = np.arange(-min(500, furthest), min(500, furthest) + 1)
    anywhere = numbers.integers(-furthest, furthest, 2000, endpoint=True)
    assert bool(could_be_drawn(torch.tensor(np.concatenate([near, anywhere])) + round(mean), std, mean).all())


@pytest.mark.parametrize(("std", "mean"), [(0.99, 0.0), (2.0**58 * 1.01, 0.0), (math.nan, 0.0), (10.0, 2.0**62)])
def test_a_grid_too_coarse_or_too_fine_is_refused(std, mean):
    with pytest.raises(RandomnessError, match="grid Gaussian"):
        grid_gaussian(fresh("range"), (3,), std, mean)


# --- standard_normal --------------------------------------------------------------------------------------------------
def test_standard_normal_is_gaussian_to_thirty_bits(samples):
    rounded_gaussian((standard_normal(fresh("normal"), (samples,)) * 2.0**30).round(), 2.0**30)


def test_the_largest_gaussian_is_below_8_6():
    """The extreme words: uniforms of zero give the largest radius, sqrt(2 * 53 * log 2); all ones give radius 0."""
    zero, quarter, half, ones = 0, 1 << 51, 1 << 52, -1
    largest = standard_normal(Scripted([zero, zero, zero, zero, half, quarter]), (6,))
    assert largest[:2].tolist() == [math.sqrt(106 * math.log(2)), -math.sqrt(106 * math.log(2))]
    assert float(largest.abs().max()) < 8.6
    assert standard_normal(Scripted([ones, quarter]), (2,)).abs().max() == 0.0


@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (7,), (3, 5), (2, 3, 1)])
def test_any_shape_is_filled_also_with_an_odd_count(shape):
    gaussians = standard_normal(fresh("odd"), shape)
    assert gaussians.shape == shape
    assert gaussians.dtype == torch.float64
    assert bool(gaussians.isfinite().all())
    assert len(gaussians.unique()) == math.prod(shape)


def judge_pairs(first, second):
    """Independent standard Gaussians, by the chi-square of 32 x 32 cells and the correlation of squares; 1e-6 each."""
    first, second = first.numpy(), second.numpy()
    edges = stats.norm.ppf(np.arange(1, 32) / 32)
    cells = np.searchsorted(edges, first) * 32 + np.searchsorted(edges, second)
    squares = float(np.corrcoef(first**2, second**2)[0, 1]) * math.sqrt(len(first))
    against = [chi_square(np.bincount(cells, minlength=1024), np.full(1024, 1 / 1024)), 2 * stats.norm.sf(abs(squares))]
    if not min(against) >= 1e-6:
        raise RejectedError(f"pairs: {against}")


def box_muller(radius_word, angle_word):
    radius = (-2 * ((radius_word.double() + 1) / 2**30).log()).sqrt()
    angle = angle_word.double() * (2 * math.pi / 2**30)
    return radius * angle.cos(), radius * angle.sin()


def test_the_two_gaussians_of_a_pair_are_independent(samples):
    gaussians = standard_normal(fresh("pairs"), (samples,))
    judge_pairs(gaussians[: samples // 2], gaussians[samples // 2 :])


def test_pairs_that_depend_on_each_other_are_rejected():
    words = uniform_below(fresh("wrong pairs"), (2, 150_000), 1 << 30)
    judge_pairs(*box_muller(words[0], words[1]))
    with pytest.raises(RejectedError):
        judge_pairs(*box_muller(words[0], words[0]))  # one uniform for radius and angle
    with pytest.raises(RejectedError):
        judge_pairs(*box_muller(words[0], words[1] // 2))  # half of the circle
    with pytest.raises(RejectedError):  # one radius for all pairs of a block of two
        judge_pairs(*box_muller(words[0], words[1])[:1], box_muller(words[0], words[1].roll(1))[0])


# --- memory -----------------------------------------------------------------------------------------------------------
DRAWS = {
    "uniform_below": lambda stream: uniform_below(stream, (3, 501), PRIME_28),
    "standard_normal, odd": lambda stream: standard_normal(stream, (3, 501)),
    "standard_normal, even": lambda stream: standard_normal(stream, (4, 500)),
    "grid_gaussian": lambda stream: grid_gaussian(stream, (3, 501), 1e6),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_not_overwritten_by_the_next(draw):
    """Noise that is still in use must not change under a share, whatever memory is kept for speed."""
    owner = generator("memory")
    first = draw(owner.fresh())
    kept = first.clone()
    for _ in range(3):
        draw(owner.fresh())
    assert torch.equal(first, kept)
    assert torch.equal(draw(owner.replay(0)), kept)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_threads_that_draw_at_the_same_time_do_not_disturb_each_other(draw):
    owner = generator("memory/threads")
    expected = [draw(owner.fresh()) for _ in range(64)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: draw(owner.replay(number)), range(64)))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# --- signs ------------------------------------------------------------------------------------------------------------
def test_signs_are_fair_and_independent(samples):
    signs = random_signs(fresh("signs"), samples)
    assert signs.dtype == torch.float64
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    uniform_integers((signs + 1) / 2, 2)


def test_unfair_signs_are_rejected():
    with pytest.raises(RejectedError, match="bins"):
        uniform_integers(uniform_below(fresh("unfair"), (300_000,), 99) < 48, 2)


# --- haar_orthogonal --------------------------------------------------------------------------------------------------
def orthogonal_matrices(count, size):
    owner = generator(f"haar/{size}")
    nothing = torch.empty(size, 0, dtype=torch.float64)
    return torch.stack([haar_orthogonal(owner.fresh(), nothing, size) for _ in range(count)]).numpy()


def qr_as_it_is(count, size):
    """Without the signs of R's diagonal: LAPACK makes the first entry of every column negative, or nearly so."""
    gaussians = torch.randn(count, size, size, generator=seeded(), dtype=torch.float64)
    return torch.linalg.qr(gaussians).Q.numpy()


@pytest.mark.parametrize(("rows", "kept", "columns"), [(4, 0, 4), (5, 1, 3), (6, 2, 4), (7, 2, 1)])
def test_haar_columns_are_orthonormal_and_orthogonal_to_the_fixed_ones(rows, kept, columns):
    owner = generator("haar/shape")
    fixed = haar_orthogonal(owner.fresh(), torch.empty(rows, 0, dtype=torch.float64), kept)
    drawn = haar_orthogonal(owner.fresh(), fixed, columns)
    assert drawn.shape == (rows, columns)
    torch.testing.assert_close(drawn.T @ drawn, torch.eye(columns, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(fixed.T @ drawn, torch.zeros(kept, columns, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("size", [3, 4])
def test_haar_matrices_are_haar(size, full):
    haar(orthogonal_matrices(100_000 if full else 3000, size))


@pytest.mark.parametrize("size", [3, 4])
def test_qr_without_the_sign_correction_is_not_haar(size):
    with pytest.raises(RejectedError, match=r"signs.*mean"):
        haar(qr_as_it_is(3000, size))


def test_gram_schmidt_of_uniforms_is_not_haar():
    cubes = 2 * torch.rand(20_000, 3, 3, generator=seeded(), dtype=torch.float64) - 1
    basis, upper = torch.linalg.qr(cubes)
    matrices = basis * upper.diagonal(dim1=1, dim2=2).sign()[:, None, :]
    with pytest.raises(RejectedError, match="moment"):
        haar(matrices.numpy())


def test_haar_on_a_complement_is_haar_there(full):
    """In coordinates of the complement of two fixed columns of height 5 the three new columns are Haar again."""
    owner = generator("haar/complement")
    basis = haar_orthogonal(owner.fresh(), torch.empty(5, 0, dtype=torch.float64), 5)
    fixed, complement = basis[:, :2], basis[:, 2:]
    count = 100_000 if full else 3000
    haar(torch.stack([complement.T @ haar_orthogonal(owner.fresh(), fixed, 3) for _ in range(count)]).numpy())


# --- the judges themselves --------------------------------------------------------------------------------------------
def test_a_judge_rejects_what_is_not_a_number():
    with pytest.raises(RejectedError), np.errstate(invalid="ignore"):
        integers(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize(
    "judge", [lambda n: uniform_integers(np.full(n, 3), 7), lambda n: rounded_gaussian([5] * n, 9)]
)
def test_a_judge_rejects_a_constant(judge):
    with pytest.raises(RejectedError, match="lags"), np.errstate(invalid="ignore", divide="ignore"):
        judge(10_000)
