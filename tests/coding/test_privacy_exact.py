"""M workers learn nothing in the field: exactly, by counting every noise there is (contract test of coding.field).

Over a small prime all noise r and s can be tried. For each coalition of M workers and all data, every view (the
coalition's shares of x and of delta together, as a worker sees both) comes up equally often, so the view is uniform and
independent of the data. One worker more, or any broken scheme, and the same count finds a dependence.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch

from darknight.coding import PRIME_25, PRIME_28, Code, Mixing, field
from darknight.coding.dense import field_dense
from darknight.coding.systematic import field_systematic
from darknight.randomness import uniform_below
from randomness.streams import Scripted, generator


def systematic(inputs, colluders, spares, prime, masked=True):
    return lambda: field_systematic(inputs, colluders, spares, prime, masked)


def dense(inputs, colluders, spares, prime, masked=True):
    label = f"exact/{inputs}/{colluders}/{spares}/{prime}/{masked}"
    return cache(lambda: field_dense(generator(label).fresh(), inputs, colluders, spares, prime, masked))


def on_a_line(inputs, prime):
    """M=2 by hand: noise blocks whose rows are different points of the projective line, so that no minor is zero.

    The largest code that F_prime allows has prime + 1 points. Only the noise blocks matter to privacy, so the data
    blocks are simply full of ones.
    """
    points = [(0, 1), *((1, slope) for slope in range(prime))]
    ones = ((1,) * inputs,) * len(points)
    base = tuple(range(inputs + 2))
    return lambda: Code(prime, Mixing(ones, tuple(points), base), Mixing(ones, tuple(reversed(points)), base), base)


SIX_POINTS = on_a_line(1, 5)
CODES = {
    **{f"p={p} K={K} M=1 E={E}": systematic(K, 1, E, p) for p in (5, 7) for K in (1, 2) for E in (0, 1)},
    "p=5 K=3 M=1 E=0": systematic(3, 1, 0, 5),
    "p=7 K=3 M=1 E=1": systematic(3, 1, 1, 7),
    "p=11 K=1 M=1 E=1": systematic(1, 1, 1, 11),
    "p=11 K=2 M=1 E=1": systematic(2, 1, 1, 11),
    "p=7 K=1 M=2 E=0": systematic(1, 2, 0, 7),
    "p=7 K=2 M=2 E=0": systematic(2, 2, 0, 7),
    "p=11 K=1 M=2 E=0": systematic(1, 2, 0, 11),
    "p=7 K=2 M=1 E=1 clear gradients": systematic(2, 1, 1, 7, masked=False),
    "p=7 K=1 M=2 E=0 clear gradients": systematic(1, 2, 0, 7, masked=False),
    "p=5 K=2 M=1 E=1 dense": dense(2, 1, 1, 5),
    "p=7 K=2 M=1 E=1 dense": dense(2, 1, 1, 7),
    "p=7 K=1 M=2 E=0 dense": dense(1, 2, 0, 7),
    "p=7 K=1 M=2 E=1 dense": dense(1, 2, 1, 7),
    "p=5 K=1 M=2 six points": SIX_POINTS,
}
SMALL = {name: code for name, code in CODES.items() if name.startswith(("p=5", "p=7")) and "K=3" not in name}
MASKED = {name: code for name, code in SMALL.items() if "clear" not in name and "points" not in name}

# Views to count for one code in the reduced run; beyond that every n-th data value is taken.
_REDUCED_VIEWS = 200_000

Vector = tuple[int, ...]


def vectors(length: int, prime: int) -> list[Vector]:
    return list(product(range(prime), repeat=length))


def units(length: int) -> list[Vector]:
    """Zero and the unit vectors. Shares are linear, so a dependence on the data shows on these."""
    return [(0,) * length, *(tuple(int(i == j) for j in range(length)) for i in range(length))]


def shares(mixing: Mixing, coalition: Vector, data: Vector, noise: Vector, prime: int) -> Vector:
    """The coalition's part of A [x; r], in plain integers."""
    return tuple(sum(c * v for c, v in zip(mixing.rows[j], data + noise, strict=True)) % prime for j in coalition)


class Views:
    """What a coalition can see, for any data, when the noise takes the values in `noises` (one per masked matrix)."""

    def __init__(self, code: Code, coalition: Vector, noises: list[tuple[Vector, ...]]) -> None:
        self._code, self._coalition, self._noises = code, coalition, noises
        self._known: list[dict[tuple[Vector, Vector], Vector]] = [{} for _ in code.masking]

    def _shares(self, place: int, data: Vector, noise: Vector) -> Vector:
        known = self._known[place]
        if (data, noise) not in known:
            known[data, noise] = shares(self._code.masking[place], self._coalition, data, noise, self._code.prime)
        return known[data, noise]

    def of(self, datas: tuple[Vector, ...]) -> Counter:
        """How often each view comes up, for x and delta in `datas`."""
        if len(datas) == 1:
            return Counter(self._shares(0, datas[0], noise) for (noise,) in self._noises)
        x, delta = datas
        see = [
            {noise: self._shares(place, data, noise) for noise in {pair[place] for pair in self._noises}}
            for place, data in enumerate((x, delta))
        ]
        return Counter([(see[0][r], see[1][s]) for r, s in self._noises])


def all_noises(code: Code) -> list[tuple[Vector, ...]]:
    """Every r, and with masked gradients every r with every s."""
    return list(product(*(vectors(mixing.colluders, code.prime) for mixing in code.masking)))


def coalitions(code: Code, size: int) -> list[Vector]:
    return list(combinations(range(code.A.workers), size))


def leaking(code: Code, size: int, noises=None) -> set[Vector]:
    """The coalitions of `size` whose view depends on the data."""
    noises = noises or all_noises(code)
    found = set()
    for coalition in coalitions(code, size):
        views = Views(code, coalition, noises)
        first, *others = product(*(units(mixing.inputs) for mixing in code.masking))
        reference = views.of(first)
        if any(views.of(other) != reference for other in others):
            found.add(coalition)
    return found


# --- the guarantee ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("build", CODES.values(), ids=CODES)
def test_every_view_of_m_workers_is_equally_likely_whatever_the_data(build, full):
    code = build()
    noises = all_noises(code)
    datas = list(product(*(vectors(mixing.inputs, code.prime) for mixing in code.masking)))
    everyone = coalitions(code, code.A.colluders)
    if not full:
        stride = len(datas) * len(noises) * len(everyone) // _REDUCED_VIEWS + 1
        datas = datas[:: stride + (stride % code.prime == 0)]  # not a multiple of the prime, or some digits never move
    every_view = code.prime ** (code.A.colluders * len(code.masking))
    for coalition in everyone:
        views = Views(code, coalition, noises)
        for data in datas:
            counted = views.of(data)
            assert len(counted) == every_view, f"workers {coalition} can rule views out"
            assert set(counted.values()) == {len(noises) // every_view}


@pytest.mark.parametrize("build", SMALL.values(), ids=SMALL)
def test_no_smaller_coalition_sees_a_dependence_and_every_larger_one_does(build):
    code = build()
    colluders = code.A.colluders
    for size in range(1, colluders + 1):
        assert not leaking(code, size)
    if build is not SIX_POINTS:  # its data blocks are not those of a code
        assert leaking(code, colluders + 1) == set(coalitions(code, colluders + 1))


# --- broken schemes, which the same count must find -------------------------------------------------------------------
def with_noise(mixing: Mixing, rows: dict[int, Vector]) -> Mixing:
    return replace(mixing, noise=tuple(rows.get(j, noise) for j, noise in enumerate(mixing.noise)))


SYSTEMATIC_MASKED = {name: code for name, code in MASKED.items() if "dense" not in name}


@pytest.mark.parametrize("build", SYSTEMATIC_MASKED.values(), ids=SYSTEMATIC_MASKED)
def test_d_equal_to_zero_shows_delta_to_the_carriers_of_r(build):
    """B's last noise block zeroed: what a, b = +-1 with C = sqrt(K) can come to over the reals."""
    code = build()
    K, M = code.A.inputs, code.A.colluders
    carriers = range(K + M, K + 2 * M)
    broken = replace(code, B=with_noise(code.B, dict.fromkeys(carriers, (0,) * M)))
    found = leaking(broken, M)
    assert {coalition for coalition in coalitions(code, M) if set(coalition) & set(carriers)} == found


@pytest.mark.parametrize("build", MASKED.values(), ids=MASKED)
def test_a_missing_noise_row_is_found(build):
    """The last row of r stays zero, for x only."""
    code = build()
    M = code.A.colluders
    noises = [(r, s) for r, s in all_noises(code) if r[-1] == 0]
    found = leaking(code, M, noises)
    assert found
    if M == 1:  # then the share is the data's part alone
        assert found == {(j,) for j, row in enumerate(code.A.data) if any(value % code.prime for value in row)}


@pytest.mark.parametrize("build", MASKED.values(), ids=MASKED)
def test_one_noise_for_x_and_delta_is_found(build):
    code = build()
    noises = [(r, s) for r, s in all_noises(code) if r == s]
    assert leaking(code, code.A.colluders, noises)


@pytest.mark.parametrize("build", MASKED.values(), ids=MASKED)
def test_biased_noise_is_found(build):
    """r never takes the largest value: the range of an off-by-one, which no sample of a large field would show."""
    code = build()
    noises = [(r, s) for r, s in all_noises(code) if max(r) < code.prime - 1]
    assert leaking(code, code.A.colluders, noises)


@pytest.mark.parametrize("prime", [5, 7])
def test_two_workers_on_one_point_of_the_line_are_found_and_only_they(prime):
    """Privacy needs every minor: one singular pair of noise rows, and exactly that coalition learns something."""
    code = on_a_line(1, prime)()
    singular = replace(code, A=with_noise(code.A, {3: tuple(2 * v % prime for v in code.A.noise[1])}))
    assert leaking(singular, 2) == {(1, 3)}


# --- the shares that were counted are the ones that are sent ----------------------------------------------------------
@pytest.mark.parametrize("build", SMALL.values(), ids=SMALL)
def test_encode_gives_every_view_equally_often_when_its_stream_gives_every_noise(build):
    """The count again, through coding.field.encode itself: one feature for each noise, on scripted words."""
    code = build()
    for mixing in code.masking:
        noises = vectors(mixing.colluders, code.prime)
        script = [row[m] for m in range(mixing.colluders) for row in noises]
        for data in (units(mixing.inputs)[-1], (code.prime - 1,) * mixing.inputs):
            groups = torch.tensor(data)[None, :, None].expand(1, -1, len(noises))
            sent = field.encode(mixing, groups, code.prime, Scripted(script))[:, 0]
            for coalition in coalitions(code, mixing.colluders):
                counted = Counter(zip(*(sent[j].tolist() for j in coalition), strict=True))
                assert counted == Counter(shares(mixing, coalition, data, noise, code.prime) for noise in noises)
                assert len(counted) == len(noises)


REAL_PRIMES = {
    f"{kind} p={prime} K={K} M={M} E={E}": build(K, M, E, prime)
    for prime in (PRIME_25, PRIME_28)
    for kind, build in (("systematic", systematic), ("dense", dense))
    for K, M, E in ((3, 1, 1), (2, 2, 1), (3, 2, 0))
}


@pytest.mark.parametrize("build", [*SMALL.values(), *REAL_PRIMES.values()], ids=[*SMALL, *REAL_PRIMES])
def test_encode_is_the_matrix_product_with_noise_from_its_stream(build):
    code = build()
    owner, numbers = generator("exact/encode"), torch.Generator().manual_seed(0)
    for mixing in code.masking:
        stream = owner.fresh()
        shape = (2, mixing.inputs, 3, 5)
        groups = torch.randint(1 - code.prime, code.prime, shape, dtype=torch.int32, generator=numbers)
        groups[0, :, 0, :2] = torch.tensor([code.prime - 1, 1 - code.prime])
        sent = field.encode(mixing, groups, code.prime, stream)
        branches = owner.replay(stream.number).branches(mixing.colluders)
        noise = torch.stack([uniform_below(branch, (2, 3, 5), code.prime) for branch in branches])
        assert sent.dtype == torch.int32
        for group, row, column in product(range(2), range(3), range(5)):
            data = tuple(groups[group, :, row, column].tolist())
            drawn = tuple(noise[:, group, row, column].tolist())
            expected = shares(mixing, tuple(range(mixing.workers)), data, drawn, code.prime)
            assert tuple(sent[:, group, row, column].tolist()) == expected
