"""Shares at the real primes, and on the real grid, look the same whatever the data: measured, with an attacker's tools.

Field: shares of strongly non-uniform data pass the tests of uniformity, alone and in coalitions of M. Real: no share,
and no coalition, rules any candidate out with certainty; what remains is the Gaussian's envelope, which
darknight.accounting bounds. Each test also finds the broken scheme that it is there for: noise reused, a noise row
missing, D = 0, a biased reduction, one worker too many. Significance: 1e-6 for each statistic, see
randomness/judges.py. Full counts: 10^7 samples, for pairs of colluders 10^7 at the default prime; reduced: 3 * 10^5.
"""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from darknight.coding import PRIME_25, PRIME_28, Real, field, real
from darknight.coding.algebra import inverse
from darknight.coding.dense import field_dense, real_dense
from darknight.coding.systematic import field_systematic, real_systematic
from darknight.kernels import combine
from darknight.randomness import standard_normal, uniform_below
from randomness.holes import could_be_drawn, float32_reaches
from randomness.judges import RejectedError, independent_pair, rounded_gaussian, same_distribution, uniform_integers
from randomness.streams import Scripted, generator

PRIMES = {"2^25-39": PRIME_25, "2^28-57": PRIME_28}


@pytest.fixture(scope="module")
def samples(full) -> int:
    return 10_000_000 if full else 300_000


# --- field ------------------------------------------------------------------------------------------------------------
def black(inputs, samples):
    return torch.zeros(3, inputs, samples // 3, dtype=torch.int32)


def stripes(inputs, samples):
    """Constant images of different brightness, negative ones too, with a hard edge in the middle of each."""
    images = torch.empty(3, inputs, samples // 3, dtype=torch.int32)
    images[...] = torch.tensor([1023, -1023, 511, -7, 64])[:inputs][None, :, None]
    images[..., : samples // 6] = 1023
    return images


DATA = {"black": black, "stripes": stripes}
CODES = {"systematic": field_systematic, "dense": lambda *a: field_dense(generator("statistics/code").fresh(), *a)}


def send(mixing, data, prime, label):
    """(worker, sample), through field.encode with fresh noise."""
    return field.encode(mixing, data, prime, generator(f"statistics/{label}").fresh()).flatten(1)


def send_with(mixing, data, prime, noise):
    """The same with noise that the test has chosen: (noise row, group, feature)."""
    out = torch.empty(mixing.workers, data.shape[0], *data.shape[2:], dtype=torch.int32)
    combine([list(row) for row in mixing.rows], [*data.unbind(1), *noise], prime, out=out, centred=False)
    return out.flatten(1)


def judge_coalition(mixing, pair, shares, prime):
    """What two workers that know their coefficients can compute: M=2, uniform on all pairs.

    Besides the pair itself the combinations that cancel one row of noise, which is where a missing row would show:
    coarse cells see a multiple modulo a prime no better than nothing.
    """
    left, right = (shares[j].long() for j in pair)
    independent_pair(left, right, prime)
    for m in range(mixing.colluders):
        ours, theirs = (mixing.noise[j][m] for j in pair)
        uniform_integers((left * theirs - right * ours) % prime, prime)


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("prime", PRIMES.values(), ids=PRIMES)
def test_the_shares_of_every_worker_are_uniform(prime, kind, side, data, samples):
    mixing = getattr(CODES[kind](3, 1, 1, prime, True), side)
    shares = send(mixing, data(3, samples), prime, f"{prime}/{kind}/{side}/{data.__name__}")
    for worker in range(mixing.workers):
        uniform_integers(shares[worker], prime)


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("prime", PRIMES.values(), ids=PRIMES)
def test_the_shares_of_every_pair_are_uniform_together_for_two_colluders(prime, side, full, samples):
    mixing = getattr(field_systematic(2, 2, 1, prime, True), side)
    count = (samples if prime == PRIME_28 else 3_000_000) if full else 60_000
    shares = send(mixing, stripes(2, count), prime, f"pairs/{prime}/{side}")
    for pair in combinations(range(mixing.workers), 2):
        judge_coalition(mixing, pair, shares, prime)


def opened(mixing, coalition, shares, prime):
    """What M workers get by solving for the noise, as if there were no data: (noise row, sample), R + N^-1 A1 x."""
    solved = inverse([mixing.noise[j] for j in coalition], prime)
    seen = [shares[j].long() for j in coalition]
    return [sum(int(c) * share % prime for c, share in zip(row, seen, strict=True)) % prime for row in solved]


def judge_opened(mixing, coalition, shares, prime):
    rows = opened(mixing, coalition, shares, prime)
    for row in rows:
        uniform_integers(row, prime)
    for left, right in combinations(rows, 2):
        independent_pair(left, right, prime)


@pytest.mark.parametrize("side", ["A", "B"])
def test_three_colluders_that_solve_for_the_noise_find_noise(side, full):
    mixing = getattr(field_systematic(2, 3, 0, PRIME_28, True), side)
    shares = send(mixing, stripes(2, 300_000 if full else 30_000), PRIME_28, f"triples/{side}")
    for coalition in combinations(range(mixing.workers), 3):
        judge_opened(mixing, coalition, shares, PRIME_28)


@pytest.mark.parametrize("prime", PRIMES.values(), ids=PRIMES)
def test_the_shares_of_x_and_of_delta_that_one_worker_holds_are_independent(prime, samples):
    code = field_systematic(3, 1, 1, prime, True)
    owner = generator(f"statistics/both/{prime}")
    data = stripes(3, samples)
    of_x, of_delta = (field.encode(mixing, data, prime, owner.fresh()).flatten(1) for mixing in (code.A, code.B))
    for worker in range(code.A.workers):
        independent_pair(of_x[worker], of_delta[worker], prime)


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("prime", PRIMES.values(), ids=PRIMES)
def test_two_data_sets_cannot_be_told_apart_by_their_shares(prime, side, samples):
    mixing = getattr(field_systematic(3, 1, 1, prime, True), side)
    first, second = (send(mixing, data(3, samples), prime, f"two/{data.__name__}") for data in DATA.values())
    for worker in range(mixing.workers):
        same_distribution(first[worker], second[worker], prime)


def test_two_maskings_of_the_same_data_are_independent(samples):
    mixing = field_systematic(3, 1, 1, PRIME_28, True).A
    first, second = (send(mixing, stripes(3, samples), PRIME_28, f"twice/{label}") for label in "ab")
    for worker in range(mixing.workers):
        independent_pair(first[worker], second[worker], PRIME_28)


def modulo(stream, shape, prime):
    """A word below a bound that is no multiple of the prime: a seventh of the residues come twice as often."""
    return uniform_below(stream, shape, prime * 8 // 7) % prime


def scaled(stream, shape, prime):
    """A uniform float32 of 24 bits, times the prime: most residues are never reached."""
    return (uniform_below(stream, shape, 1 << 24).double() * 2.0**-24 * prime).floor().to(torch.int64)


REDUCTIONS = {"modulo": modulo, "float32 times p": scaled}


class TestABrokenFieldSchemeIsRejected:
    samples = 300_000

    def noise(self, prime, colluders=1, bound=None):
        return uniform_below(generator("statistics/broken").fresh(), (colluders, 3, self.samples // 3), bound or prime)

    def test_the_same_schemes_unbroken_are_accepted(self):
        code = field_systematic(3, 1, 1, PRIME_28, True)
        for mixing in code.masking:
            for share in send_with(mixing, stripes(3, self.samples), PRIME_28, self.noise(PRIME_28)):
                uniform_integers(share, PRIME_28)

    @pytest.mark.parametrize("prime", PRIMES.values(), ids=PRIMES)
    def test_noise_reused_for_two_maskings(self, prime):
        mixing = field_systematic(3, 1, 1, prime, True).A
        owner = generator("statistics/reused")
        first = field.encode(mixing, black(3, self.samples), prime, owner.fresh()).flatten(1)
        second = field.encode(mixing, stripes(3, self.samples), prime, owner.replay(0)).flatten(1)
        for worker in range(mixing.workers):
            uniform_integers(second[worker], prime)  # each masking alone looks right
            with pytest.raises(RejectedError, match=r"joint.*difference"):
                independent_pair(first[worker], second[worker], prime)

    @pytest.mark.parametrize("prime", PRIMES.values(), ids=PRIMES)
    def test_a_missing_noise_row(self, prime):
        mixing = field_systematic(3, 1, 1, prime, True).A
        nothing = torch.zeros_like(self.noise(prime))
        plain, other = (send_with(mixing, data(3, self.samples), prime, nothing) for data in DATA.values())
        for worker in (0, 1, 2, 3, 5):  # worker 4 carries r alone, and would see zeros for any data
            with pytest.raises(RejectedError, match="bins"):
                uniform_integers(other[worker], prime)
            with pytest.raises(RejectedError, match="residues"):
                same_distribution(plain[worker], other[worker], prime)

    @pytest.mark.parametrize("prime", PRIMES.values(), ids=PRIMES)
    def test_one_of_two_noise_rows_missing_shows_in_every_pair_with_data(self, prime):
        mixing = field_systematic(2, 2, 1, prime, True).A
        noise = self.noise(prime, colluders=2)
        noise[1] = 0
        shares = send_with(mixing, stripes(2, self.samples), prime, noise)
        for pair in combinations((0, 1, 2, 3, 6), 2):  # 4 and 5 carry one row of noise each
            with pytest.raises(RejectedError):
                judge_coalition(mixing, pair, shares, prime)
        uniform_integers(shares[0], prime)  # one worker alone still sees nothing

    def test_one_of_three_noise_rows_missing_is_found_by_those_who_solve_for_it(self):
        mixing = field_systematic(2, 3, 0, PRIME_28, True).A
        noise = self.noise(PRIME_28, colluders=3)
        noise[2] = 0
        shares = send_with(mixing, stripes(2, self.samples), PRIME_28, noise)
        for coalition in [(0, 1, 2), (1, 3, 4), (0, 2, 6)]:
            with pytest.raises(RejectedError, match="bins"):
                judge_opened(mixing, coalition, shares, PRIME_28)

    def test_two_workers_where_one_was_allowed(self):
        mixing = field_systematic(3, 1, 1, PRIME_28, True).A
        shares = send(mixing, stripes(3, self.samples), PRIME_28, "too many")
        for pair in combinations(range(mixing.workers), 2):
            with pytest.raises(RejectedError):
                judge_coalition(mixing, pair, shares, PRIME_28)

    @pytest.mark.parametrize("prime", PRIMES.values(), ids=PRIMES)
    def test_d_equal_to_zero(self, prime):
        mixing = field_systematic(3, 1, 1, prime, True).B
        carrier = 4
        broken = replace(mixing, noise=tuple((0,) if j == carrier else row for j, row in enumerate(mixing.noise)))
        plain, other = (send(broken, data(3, self.samples), prime, "d zero") for data in DATA.values())
        with pytest.raises(RejectedError, match="bins"):
            uniform_integers(other[carrier], prime)
        with pytest.raises(RejectedError, match="residues"):
            same_distribution(plain[carrier], other[carrier], prime)

    @pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
    @pytest.mark.parametrize("prime", PRIMES.values(), ids=PRIMES)
    def test_a_biased_reduction(self, prime, reduce):
        """Every worker sees it, whatever coefficient its noise has, and for black images too."""
        shape = (1, 3, self.samples // 3)
        noise = reduce(generator("statistics/reduction").fresh(), shape, prime).to(torch.int32)
        mixing = field_systematic(3, 1, 1, prime, True).A
        shares = send_with(mixing, black(3, self.samples), prime, noise)
        for worker in range(mixing.workers):
            with pytest.raises(RejectedError):
                uniform_integers(shares[worker], prime)

    def test_noise_that_is_one_bit_short(self):
        mixing = field_systematic(3, 1, 1, PRIME_28, True).A
        shares = send_with(mixing, black(3, self.samples), PRIME_28, self.noise(PRIME_28, bound=1 << 27))
        for worker in range(mixing.workers):  # 4 r covers the field, but not every remainder
            with pytest.raises(RejectedError, match=r"bins|residues"):
                uniform_integers(shares[worker], PRIME_28)

    def test_noise_that_is_one_percent_short(self):
        mixing = field_systematic(3, 1, 1, PRIME_28, True).A
        noise = self.noise(PRIME_28, bound=PRIME_28 * 99 // 100)
        shares = send_with(mixing, black(3, self.samples), PRIME_28, noise)
        with pytest.raises(RejectedError, match="bins"):
            uniform_integers(shares[0], PRIME_28)


# --- real: residues ---------------------------------------------------------------------------------------------------
def steps_of(shares, grid):
    """(worker, sample): shares in grid steps, which must be integers."""
    steps = shares.to(torch.float64).flatten(1) * 2.0**grid.exponent
    assert torch.equal(steps, steps.round())
    return steps.to(torch.int64)


def send_real(mixing, data, grid, label):
    return steps_of(real.encode(mixing, data, grid, generator(f"statistics/{label}").fresh(), torch.float64), grid)


def two_inputs(inputs, grid, samples):
    """Two data sets that differ by one grid step of the first input, so that sums with it have another remainder."""
    step = 2.0**-grid.exponent
    first = torch.full((1, inputs, samples), 1000.0, dtype=torch.float64) * step
    second = first.clone()
    second[:, 0] += step
    return first, second


def determinant_of(mixing, coalition):
    """|det| of the noise block of one or two workers."""
    N = [mixing.noise[j] for j in coalition]
    return abs(N[0][0]) if len(N) == 1 else abs(N[0][0] * N[1][1] - N[0][1] * N[1][0])


def remainders(mixing, coalition, steps):
    """What a coalition's shares leave modulo the lattice of its integer noise: a number for each sample.

    For one worker with noise coefficient c that is its share modulo c. Two shares leave the same remainder exactly if
    adj(N) times their difference is a multiple of det N; there are |det N| remainders, numbered as they are found.
    """
    determinant = determinant_of(mixing, coalition)
    if len(coalition) == 1:
        return steps[coalition[0]] % determinant
    (a, b), (c, d) = (mixing.noise[j] for j in coalition)
    left, right = (steps[j] % determinant for j in coalition)
    names = (d * left - b * right) % determinant * determinant + (a * right - c * left) % determinant
    return torch.unique(names, return_inverse=True)[1]


def with_gaps(mixing):
    """The coalitions whose integer noise leaves gaps: there is more than one remainder."""
    everyone = combinations(range(mixing.workers), mixing.colluders)
    return [coalition for coalition in everyone if determinant_of(mixing, coalition) > 1]


REAL_CODES = {
    **{f"K={K} M=1 E={E}": (K, 1, E) for K in (3, 4) for E in (0, 1)},
    "K=2 M=2 E=0": (2, 2, 0),
    "K=3 M=2 E=0": (3, 2, 0),
}


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("shape", REAL_CODES.values(), ids=REAL_CODES)
def test_what_shares_leave_modulo_their_noise_is_uniform_whatever_the_data(shape, side, full):
    """M=1: C = K and D = -(K + K mod 2), rows that carry 3 or 4 times the noise. M=2: pairs, up to 1000 remainders."""
    mixing = getattr(real_systematic(*shape, True), side)
    grid = real.grid_for(mixing, Real(10.0), 1.0)  # so small that float64 rounds no share
    samples = 1_000_000 if full else 40_000
    sent = [
        send_real(mixing, data, grid, f"remainders/{shape}/{side}/{place}")
        for place, data in enumerate(two_inputs(mixing.inputs, grid, samples))
    ]
    coalitions = with_gaps(mixing)
    assert coalitions
    for coalition in coalitions:
        count = determinant_of(mixing, coalition)
        first, second = remainders(mixing, coalition, torch.cat(sent, dim=1)).chunk(2)
        for found in (first, second):
            uniform_integers(found, count)
        same_distribution(first, second, count)


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("shape", REAL_CODES.values(), ids=REAL_CODES)
def test_without_the_fraction_the_remainder_is_the_data_with_certainty(shape, side):
    """The naive grid, Mixing.divisor = 1: one remainder for one data set, another for another."""
    naive = replace(getattr(real_systematic(*shape, True), side), divisor=1)
    grid = real.grid_for(naive, Real(10.0), 1.0)
    both = torch.cat([send_real(naive, data, grid, "naive") for data in two_inputs(naive.inputs, grid, 3000)], dim=1)
    told_apart = 0
    for coalition in with_gaps(naive):
        first, second = remainders(naive, coalition, both).chunk(2)
        assert len(first.unique()) == len(second.unique()) == 1
        with pytest.raises(RejectedError, match="bins"):
            uniform_integers(first, determinant_of(naive, coalition))
        told_apart += int(first[0] != second[0])
    assert told_apart


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("inputs", [3, 4])
def test_without_the_fraction_a_share_shows_the_sum_of_the_inputs(inputs, side):
    """sum(+-x_q) modulo C, or modulo D, can be read off one share, in every feature."""
    naive = replace(getattr(real_systematic(inputs, 1, 0, True), side), divisor=1)
    grid = real.grid_for(naive, Real(100.0), 1.0)
    row = next(j for j, (noise,) in enumerate(naive.noise) if abs(noise) >= 3)
    data = torch.rand(1, inputs, 3000, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    found = remainders(naive, (row,), send_real(naive, data, grid, "sum"))
    mixed = (torch.tensor(naive.data[row])[:, None] * real.to_grid(data, grid)[0].to(torch.int64)).sum(0)
    assert torch.equal(found, mixed % determinant_of(naive, (row,)))


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize(("inputs", "spares"), [(3, 0), (3, 1), (4, 0), (4, 1)])
def test_every_fraction_counted_once_gives_every_remainder_equally_often(inputs, spares, side):
    """M=1, exactly: the script gives each of the L fractions once, through real.encode."""
    mixing = getattr(real_systematic(inputs, 1, spares, True), side)
    grid = real.grid_for(mixing, Real(10.0), 1.0)
    L = mixing.divisor
    assert L > 1
    gaussian_words = [1 << 40] * (L + L % 2) + [12345] * L  # upper and lower bits, the same for all
    data = torch.full((1, inputs, L), 0.3, dtype=torch.float64)
    sent = steps_of(real.encode(mixing, data, grid, Scripted([*gaussian_words, *range(L)]), torch.float64), grid)
    for worker in range(mixing.workers):
        count = determinant_of(mixing, (worker,))
        found = remainders(mixing, (worker,), sent)
        assert torch.bincount(found, minlength=count).tolist() == [L // count] * count


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("inputs", [3, 4])
def test_the_noise_in_every_row_is_a_rounded_gaussian_of_its_coefficient(inputs, side, samples):
    """Also where the row carries 3 or 4 times the noise. Without the fraction it is not: most integers are missing."""
    mixing = getattr(real_systematic(inputs, 1, 1, True), side)
    grid = real.grid_for(mixing, Real(10.0), 1.0)
    zeros = torch.zeros(1, inputs, min(samples, 1_000_000), dtype=torch.float64)
    sent = send_real(mixing, zeros, grid, f"noise/{inputs}/{side}")
    naive = send_real(replace(mixing, divisor=1), zeros[..., :300_000], grid, f"noise/{inputs}/{side}")
    rows = {coefficient: worker for worker, (coefficient,) in enumerate(mixing.noise)}  # one of each
    assert max(map(abs, rows)) >= 3
    for coefficient, worker in rows.items():
        rounded_gaussian(sent[worker], abs(coefficient) * grid.std)
        if abs(coefficient) > 1:
            with pytest.raises(RejectedError, match="residues"):
                rounded_gaussian(naive[worker], abs(coefficient) * grid.std)


@pytest.mark.parametrize("noise_std", [1e3, 1.5e3])
def test_no_candidate_is_favoured_by_the_low_bits_of_its_noise(noise_std):
    """The attacker subtracts the right picture from a million shares of it, and must not see that it is right.

    The bound says that a million features tell at most 0.5 nats at noise_std=1000. round(std * z) in float64 told 140.
    """
    mixing = real_systematic(3, 1, 0, True).A
    grid = real.grid_for(mixing, Real(noise_std), 1.0)
    right, _ = pictures(3, 1_000_000)
    moved = real.to_grid(right, grid)[0, 0].to(torch.int64)
    noise = send_real(mixing, right, grid, f"low bits/{noise_std}")[0] - moved
    assert int((noise + moved).abs().max()) < 1 << 53  # float64 has rounded no share
    product = (standard_normal(generator("statistics/product").fresh(), (1_000_000,)) * 2.0**47).round().to(torch.int64)
    for modulus in (2, 3, 5, 7, 16):
        uniform_integers(noise % modulus, modulus)
    with pytest.raises(RejectedError, match="bins"):
        uniform_integers(product % 2, 2)


# --- real: holes ------------------------------------------------------------------------------------------------------
def pictures(inputs, count):
    """Two different pictures, bytes / 255 as image data comes: (group, input, feature)."""
    numbers = torch.Generator().manual_seed(4)
    return [torch.randint(0, 256, (1, inputs, count), generator=numbers).double() / 255 for _ in range(2)]


def test_float32_noise_contradicts_a_wrong_picture_and_never_the_right_one():
    """The attack that the grid is there for: one share of a 3072-pixel image, noise of 2e4 made in float32."""
    right, wrong = (picture[0, 0].float() for picture in pictures(1, 3072))
    noise = torch.randn(3072, generator=torch.Generator().manual_seed(5)) * 2e4
    share = right + noise
    assert bool(float32_reaches(share, 2e4, right).all())
    assert int((~float32_reaches(share, 2e4, wrong)).sum()) > 200


def could_be_noise(values, coefficient, divisor, grid):
    """Whether coefficient * R + round(coefficient * U / L) can be these integers, for some fraction U and Gaussian R.

    U is found by trying all; for R the keystream that makes it is computed.
    """
    fits = torch.zeros(values.shape, dtype=torch.bool)
    gaussians = torch.zeros_like(values)
    for U in range(-(divisor // 2), divisor - divisor // 2):
        rest = values - (2 * coefficient * U + divisor) // (2 * divisor)
        whole = (rest % coefficient == 0) & ~fits
        gaussians[whole] = rest[whole] // coefficient
        fits |= whole
    return fits & could_be_drawn(gaussians, grid.std, grid.mean)


REAL_BUILDS = {
    "systematic K=3": lambda: real_systematic(3, 1, 1, True),
    "systematic K=4": lambda: real_systematic(4, 1, 0, True),
    "dense K=4": lambda: real_dense(generator("statistics/real dense").fresh(), 4, 0, True),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("noise_std", [1e3, 2e4])
@pytest.mark.parametrize("build", REAL_BUILDS.values(), ids=REAL_BUILDS)
def test_no_candidate_is_ever_contradicted(build, noise_std, dtype):
    """For every worker and a wrong picture x', share - x' is noise that could have been drawn, and sends the same bits.

    Unlike float32 noise: see the test above, where the right picture stands out.
    """
    for mixing in build().masking:
        grid = real.grid_for(mixing, Real(noise_std), 1.0)
        right, wrong = pictures(mixing.inputs, 3072)
        stream = generator(f"statistics/candidates/{noise_std}/{dtype}").fresh()
        shares = real.encode(mixing, right, grid, stream, dtype)
        steps = steps_of(shares, grid)
        for worker, ((coefficient,), row) in enumerate(zip(mixing.noise, mixing.data, strict=True)):
            weights = torch.tensor([float(value) for value in row], dtype=torch.float64)
            moved = (weights[:, None] * real.to_grid(wrong, grid)[0]).sum(0).round().to(torch.int64)
            noise = steps[worker] - moved
            assert bool(could_be_noise(noise, coefficient, mixing.divisor, grid).all())
            again = ((moved + noise).to(torch.float64) * 2.0**-grid.exponent).to(dtype)
            assert torch.equal(again, shares[worker, 0])


@pytest.mark.parametrize("side", ["A", "B"])
def test_without_the_fraction_a_wrong_candidate_is_contradicted(side):
    naive = replace(getattr(real_systematic(3, 1, 0, True), side), divisor=1)
    grid = real.grid_for(naive, Real(100.0), 1.0)
    right, wrong = pictures(3, 3072)
    steps = send_real(naive, right, grid, "naive candidates")
    row = next(j for j, (noise,) in enumerate(naive.noise) if abs(noise) >= 3)
    weights = torch.tensor(naive.data[row])[:, None]
    rest = [steps[row] - (weights * real.to_grid(x, grid)[0].to(torch.int64)).sum(0) for x in (right, wrong)]
    possible = [could_be_noise(values, naive.noise[row][0], 1, grid) for values in rest]
    assert bool(possible[0].all())
    assert int((~possible[1]).sum()) > 1500
