"""Search, offline, for the public coefficients of the real-valued masking code with two or three colluders.

The code. K inputs, M colluders, E spares; integer matrices a, b (K, M) and C (M, M), and D = -(a^T b) - C^T. One row
per worker, K data columns followed by M noise columns:

            data   noise                      data   noise
    A =  [   I_K     a   ]  K rows    B = [   I_K     b   ]  data workers
         [  -b^T     C   ]  M rows        [    0     I_M  ]  carriers of s
         [    0     I_M  ]  M rows        [  -a^T     D   ]  carriers of r
         [  spare_A      ]  E rows        [  spare_B      ]  spares

so that B^T A = diag(I_K, 0) on the first K + 2M rows, whatever a, b and C are.

Privacy. For every coalition S of M rows, spares included, and for A and B separately, the M x M noise minor is non-zero
and, with data block A1 and noise block A2 of S,

    factor(S) = sum_ij |Q_ij|,   Q = A1^T (A2 A2^T)^-1 A1:

S learns at most C1^2 / (2 sigma^2) * factor(S) nats per feature about inputs bounded by C1, however they depend on each
other. Noise rows are drawn with standard deviation sigma * scale; scale_A and scale_B are the square roots of the worst
factor of A and of B, rounded up at the fourth decimal, so that after scaling every factor is at most 1. A sum of
absolute values need not shrink with the coalition, so the worst is taken over the coalitions of fewer rows as well.

Objective. The rounding error of grad weight grows with

    amplification = scale_A scale_B sqrt( sum over the first K + 2M rows j of |A2_j|^2 |B2_j|^2 ),

which is minimised. It does not change under a -> t a, b -> u b, C -> t u C, so integers lose nothing but size.

Limits. divisor_A is the smallest L for which L A2_S^-1 is an integer matrix for every coalition S of M rows (the lcm of
the largest invariant factors of the A2_S); divisor_A and divisor_B are at most 2^40. Any K + M rows of A, and of B, are
invertible; `condition` is their largest condition number, at most 1e4 without spares and 1e6 with. Smaller divisors and
conditions break near ties, and a divisor that leaves no room for spares costs a little.

Method. Simulated annealing of many chains at once over the integer entries, in stages that reheat copies of the best of
the stage before, then a descent over all single and paired steps. Most chains keep a symmetry (signed permutations of
inputs and noise columns) until the last stage. Every third round reheats the best known. A round has its own seed, so
--rounds repeats a run from the same table; --seconds bounds it, between rounds. Spares extend the solution without
spares, A and B apart: noise rows are enumerated, data entries drawn, and the scale grows only where no row was found
within it. A group (K, M) of an existing table is replaced only by a better one; another --seed looks elsewhere. The
constants are public: nothing here needs a secure generator. MALLOC_MMAP_THRESHOLD_=1000000000 and
MALLOC_TRIM_THRESHOLD_=2000000000 in the environment let glibc reuse the temporaries: two to three times faster.

    python scripts/search_real_coefficients.py --seconds 60              # the whole table
    python scripts/search_real_coefficients.py --only 4,2 --seconds 300  # K=4, M=2
    python scripts/search_real_coefficients.py --check                   # verify the table, exactly where it is exact
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Rows = list[list[int]]
Entry = dict[str, Any]

TABLE = Path(__file__).resolve().parent.parent / "src" / "darknight" / "coding" / "real_coefficients.json"
COMMENT = (
    "Public integer coefficients of the real-valued masking code with two or more colluders. Written by "
    "scripts/search_real_coefficients.py, whose docstring defines every field; its --check verifies this file."
)
SPARES = {2: (0, 1, 2), 3: (0, 1)}
GROUPS = [(inputs, 2) for inputs in range(1, 9)] + [(inputs, 3) for inputs in range(1, 5)]

DIVISOR_BITS = 40
ROOMY_BITS = 36  # a divisor beyond this is dearer: spares need the rest
CONDITION_LIMIT = {False: 1e4, True: 1e6}  # keyed by "has spares"
CHAINS = 96
HOT, COLD = 0.4, 0.004  # temperatures, in units of log amplification
STAGES = [(HOT, 4000, 12), (HOT / 4, 3000, 4), (HOT / 8, 3000, 12)]  # first temperature, steps, survivors
BIT, CROWDED, OVER, DECADE = 0.001, 0.02, 0.2, 0.01  # price of a divisor's bit, three ways; of a decade of condition
SPARE_REACH = {2: 224, 3: 24}  # largest noise entry tried in a spare row
SPARE_DRAWS = 4000  # draws of the data entries of one spare row


# --- the code ---------------------------------------------------------------------------------------------------------


def noise_d(a: Array, b: Array, c: Array) -> Array:
    """D = -(a^T b) - C^T, over any leading batch axes."""
    return -(np.swapaxes(a, -1, -2) @ b) - np.swapaxes(c, -1, -2)


def code(a: Array, b: Array, c: Array, spare_a: Rows, spare_b: Rows) -> tuple[Array, Array]:
    """A and B as integer arrays (worker, source)."""
    inputs, colluders = a.shape
    data, carrier = np.eye(inputs, dtype=np.int64), np.eye(colluders, dtype=np.int64)
    none = np.zeros((colluders, inputs), dtype=np.int64)
    mix_a = np.block([[data, a], [-b.T, c], [none, carrier]])
    mix_b = np.block([[data, b], [none, carrier], [-a.T, noise_d(a, b, c)]])
    width = inputs + colluders
    return (
        np.vstack([mix_a, np.array(spare_a, dtype=np.int64).reshape(-1, width)]),
        np.vstack([mix_b, np.array(spare_b, dtype=np.int64).reshape(-1, width)]),
    )


def worst_factor(mix: Array, inputs: int) -> float:
    """The largest factor over all coalitions of at most M rows; infinite when a noise minor vanishes."""
    worst, colluders = 0.0, mix.shape[1] - inputs
    for size in range(1, colluders + 1):
        block = mix[np.array(list(combinations(range(len(mix)), size)))].astype(float)
        data, noise = block[..., :inputs], block[..., inputs:]
        gram = noise @ np.swapaxes(noise, -1, -2)
        if np.abs(np.linalg.det(gram)).min() < 0.5:  # an integer
            return math.inf
        leak = np.swapaxes(data, -1, -2) @ np.linalg.solve(gram, data)
        worst = max(worst, float(np.abs(leak).sum(axis=(-1, -2)).max()))
    return worst


def divisor(noise: Array, limit: int = 1 << 62) -> int:
    """The smallest L such that L N_S^-1 is an integer matrix for all M-row blocks N_S; stops early above `limit`."""
    result, rows = 1, noise.tolist()
    for members in combinations(rows, noise.shape[1]):
        adjugate = adjugate_rows(members)
        minor = dot(members[0], adjugate[0])
        if minor == 0:
            return 1 << 62
        result = math.lcm(result, abs(minor) // math.gcd(minor, *(value for row in adjugate for value in row)))
        if result > limit:
            break
    return result


def adjugate_rows(rows: Sequence[Sequence[Any] | Array]) -> list[list[Any]]:
    """Vectors v_i with rows[i] . v_i = det and rows[j] . v_i = 0, of two or three rows of integers or of arrays."""
    if len(rows) == 2:
        (p, q), (r, s) = rows
        return [[s, -r], [-q, p]]
    pairs = ((rows[1], rows[2]), (rows[2], rows[0]), (rows[0], rows[1]))
    return [[u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2], u[0] * v[1] - u[1] * v[0]] for u, v in pairs]


def dot(left: Sequence[Any] | Array, right: Sequence[Any] | Array) -> Any:
    """Sum of products over the first axis, for integers or arrays."""
    total = left[0] * right[0]
    for x, y in zip(left[1:], right[1:], strict=True):
        total = total + x * y
    return total


def condition(mix: Array) -> float:
    """The largest condition number over all square blocks of rows; infinite when one is singular."""
    index = np.array(list(combinations(range(len(mix)), mix.shape[1])))
    singular = np.linalg.svd(mix[index].astype(float), compute_uv=False)
    low = singular[:, -1].min()
    return float((singular[:, 0] / singular[:, -1]).max()) if low > 1e-9 else math.inf


def round_up(value: float) -> float:
    """Up at the fourth decimal, and once more when that would leave no room for the rounding of `value` itself."""
    return math.ceil(value * 1e4 + 1e-7) / 1e4


def amplification(a: Array, b: Array, c: Array, scale_a: float, scale_b: float) -> float:
    """The error amplification of grad weight; carriers have unit noise rows."""
    total = (np.square(a).sum(axis=1) * np.square(b).sum(axis=1)).sum()
    return scale_a * scale_b * math.sqrt(total + np.square(c).sum() + np.square(noise_d(a, b, c)).sum())


def make_entry(a: Array, b: Array, c: Array, spare_a: Rows, spare_b: Rows) -> Entry | None:
    """The table's record of one code, or None when it breaks a limit."""
    inputs, colluders = a.shape
    mixes = code(a, b, c, spare_a, spare_b)
    divisors = [divisor(mix[:, inputs:], 1 << DIVISOR_BITS) for mix in mixes]
    if max(divisors) > 1 << DIVISOR_BITS:
        return None
    worst = [worst_factor(mix, inputs) for mix in mixes]
    if not np.isfinite(worst).all():
        return None
    cond = max(condition(mix) for mix in mixes)
    if cond > CONDITION_LIMIT[bool(spare_a)]:
        return None
    scale_a, scale_b = (round_up(math.sqrt(factor)) for factor in worst)
    return {
        "inputs": inputs,
        "colluders": colluders,
        "spares": len(spare_a),
        "a": a.tolist(),
        "b": b.tolist(),
        "C": c.tolist(),
        "spare_A": spare_a,
        "spare_B": spare_b,
        "scale_A": scale_a,
        "scale_B": scale_b,
        "amplification": round(amplification(a, b, c, scale_a, scale_b), 4),
        "divisor_A": divisors[0],
        "divisor_B": divisors[1],
        "condition": round(cond, 2),
    }


def divisor_price(bits: Any) -> Any:
    """The price of a divisor: small, more where it leaves no room for spares, and steep above the limit."""
    return BIT * bits + CROWDED * np.maximum(bits - ROOMY_BITS, 0.0) + OVER * np.maximum(bits - DIVISOR_BITS, 0.0)


def merit(entry: Entry) -> float:
    """What is minimised: log amplification, and near ties by divisors and condition."""
    price = sum(float(divisor_price(math.log2(entry[key]))) for key in ("divisor_A", "divisor_B"))
    return math.log(entry["amplification"]) + price + DECADE * math.log10(entry["condition"])


# --- many candidates at once ------------------------------------------------------------------------------------------


class Smoothness:
    """Estimates log2 of an lcm: exact for prime powers of small primes, an overestimate for the rest."""

    LIMIT = 1 << 15

    def __init__(self) -> None:
        self.masks = np.zeros(self.LIMIT + 1, dtype=np.uint64)
        rest = np.arange(self.LIMIT + 1)
        weights: list[float] = []
        for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47):
            power = prime
            while power <= self.LIMIT and len(weights) < 64:
                self.masks[power::power] |= np.uint64(1 << len(weights))
                rest[power::power] //= prime
                weights.append(math.log2(prime))
                power *= prime
        self.weights = np.array(weights + [0.0] * (64 - len(weights)))
        self.rough = np.log2(np.maximum(rest, 1))
        self.rough[self.LIMIT] = 2 * DIVISOR_BITS  # stands for everything too large to look up

    def bits(self, minors: Array) -> Array:
        """log2 lcm of minors (coalition, candidate) per candidate."""
        index = np.minimum(np.abs(minors), self.LIMIT).astype(np.int64)
        mask = np.bitwise_or.reduce(self.masks[index], axis=0)
        flags = np.unpackbits(mask[:, None].astype("<u8").view(np.uint8), axis=1, bitorder="little")
        return np.asarray(flags @ self.weights + self.rough[index].sum(axis=0))


SMOOTH = Smoothness()


class Shape:
    """The coalitions of one (K, M), apart by whether a row that mixes inputs takes part, and the cost of candidates.

    Arrays keep the candidate as their last axis: the blocks are tiny, so the candidates are what is vectorised.
    """

    def __init__(self, inputs: int, colluders: int) -> None:
        self.inputs, self.colluders = inputs, colluders
        members = np.array(list(combinations(range(inputs + 2 * colluders), colluders)))
        mixed = ((members >= inputs) & (members < inputs + colluders)).any(axis=1)
        self.pure, self.mixed = members[~mixed], members[mixed]
        self.holds = (self.pure < inputs).astype(float)  # carriers hold no data

    def factors(self, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        """Worst factor of A per candidate where no minor is zero, and the minors. (b, a, D) gives those of B."""
        candidates, (inputs, colluders) = a.shape[-1], (self.inputs, self.colluders)
        carrier = np.repeat(np.eye(colluders)[..., None], candidates, axis=2)
        noise = np.concatenate([a, c, carrier]).transpose(1, 0, 2).copy()  # (column, worker, candidate)

        rows = [noise[:, self.pure[:, i]] for i in range(colluders)]
        adjugate = adjugate_rows(rows)
        pure_minors = dot(rows[0], adjugate[0])
        total = np.zeros_like(pure_minors)
        for i in range(colluders):
            for j in range(i + 1):
                weight = (self.holds[:, i] * self.holds[:, j] * (1 if i == j else 2))[:, None]
                total += weight * np.abs(dot(adjugate[i], adjugate[j]))
        square = np.square(pure_minors)
        worst = np.where(square == 0, 1.0, total / np.maximum(square, 0.5)).max(axis=0)

        data = np.zeros((inputs + 2 * colluders, inputs, candidates))
        data[np.arange(inputs), np.arange(inputs)] = 1
        data[inputs : inputs + colluders] = -b.transpose(1, 0, 2)
        rows = [noise[:, self.mixed[:, i]] for i in range(colluders)]
        adjugate = adjugate_rows(rows)
        minors = dot(rows[0], adjugate[0])
        held = [data[self.mixed[:, i]] for i in range(colluders)]  # (coalition, input, candidate)
        spread = [dot([v[column][:, None] for v in adjugate], held) for column in range(colluders)]
        total = np.zeros_like(minors)
        for k in range(inputs):
            leak = np.abs(dot([part[:, k : k + 1] for part in spread], [part[:, k:] for part in spread]))
            total += 2 * leak.sum(axis=1) - leak[:, 0]
        square = np.square(minors)
        factors = np.where(square == 0, 1.0, total / np.maximum(square, 0.5))
        return np.maximum(worst, factors.max(axis=0)), np.concatenate([pure_minors, minors])

    def split(self, genes: Array) -> tuple[Array, Array, Array]:
        """Flat candidates (candidate, entry) -> a, b, C, candidate first."""
        side = self.inputs * self.colluders
        a = genes[:, :side].reshape(-1, self.inputs, self.colluders)
        b = genes[:, side : 2 * side].reshape(-1, self.inputs, self.colluders)
        return a, b, genes[:, 2 * side :].reshape(-1, self.colluders, self.colluders)

    def cost(self, genes: Array) -> Array:
        """log amplification plus the price of the divisors, per candidate."""
        a, b, c = (part.transpose(1, 2, 0).copy() for part in self.split(genes))
        d = -(a[:, :, None] * b[:, None, :]).sum(axis=0) - c.transpose(1, 0, 2)
        factor_a, minors_a = self.factors(a, b, c)
        factor_b, minors_b = self.factors(b, a, d)
        norms = (np.square(a).sum(axis=1) * np.square(b).sum(axis=1)).sum(axis=0)
        norms = norms + np.square(c).sum(axis=(0, 1)) + np.square(d).sum(axis=(0, 1))
        bits = np.stack([SMOOTH.bits(minors_a), SMOOTH.bits(minors_b)])
        cost = 0.5 * np.log(factor_a * factor_b * np.maximum(norms, 1.0)) + divisor_price(bits).sum(axis=0)
        zeros = (minors_a == 0).sum(axis=0) + (minors_b == 0).sum(axis=0)
        return np.asarray(np.where(zeros > 0, 1e3 + zeros, cost))


# --- search -----------------------------------------------------------------------------------------------------------


class Best:
    """The best entry seen, checked exactly before it is believed."""

    def __init__(self, shape: Shape, entry: Entry | None) -> None:
        self.shape, self.entry = shape, entry

    @property
    def merit(self) -> float:
        return merit(self.entry) if self.entry else math.inf

    def offer(self, genes: Array) -> bool:
        a, b, c = (part[0].astype(np.int64) for part in self.shape.split(genes[None]))
        entry = make_entry(a, b, c, [], [])
        if entry is None or merit(entry) >= self.merit - 1e-9:
            return False
        self.entry = entry
        return True

    def genes(self) -> Array | None:
        if self.entry is None:
            return None
        return np.concatenate([np.array(self.entry[key], dtype=float).ravel() for key in ("a", "b", "C")])


class Chains(NamedTuple):
    """Candidates (chain, entry) and the symmetry that each keeps: entry = sign * leader, and leaders move."""

    genes: Array
    leader: Array
    sign: Array

    def take(self, index: Array) -> Chains:
        return Chains(self.genes[index], self.leader[index], self.sign[index])

    def free(self) -> Chains:
        """The same candidates without symmetry."""
        leader = np.tile(np.arange(self.genes.shape[1]), (len(self.genes), 1))
        return Chains(self.genes, leader, np.ones_like(self.genes))


def signed_permutation(cycles: list[tuple[int, int]]) -> Array:
    """Cycles (length, sign on the way back) in a row."""
    matrix, first = np.zeros((sum(length for length, _ in cycles),) * 2), 0
    for length, sign in cycles:
        for step in range(length):
            matrix[first + (step + 1) % length, first + step] = sign if step == length - 1 else 1
        first += length
    return matrix


def symmetry(shape: Shape, rng: np.random.Generator) -> tuple[Array, Array]:
    """Leaders and signs of a random symmetry P a R^T = a, P b T^T = b, T C R^T = C with signed permutations P, R, T.

    It permutes the coalitions, so that minors and factors repeat: fewer entries to search, and smaller divisors.
    """
    inputs, colluders = shape.inputs, shape.colluders
    side, size = inputs * colluders, 2 * inputs * colluders + colluders**2
    while True:
        length = int(rng.integers(1, min(inputs, 4) + 1))
        cycles = [(length, int(rng.choice([-1, 1])))] * (inputs // length)
        cycles += [(1, int(rng.choice([-1, 1]))) for _ in range(inputs % length)]
        p = signed_permutation(cycles)
        r, t = (np.eye(colluders)[rng.permutation(colluders)] * rng.choice([-1, 1], colluders) for _ in range(2))
        action = np.zeros((size, size))
        action[:side, :side], action[side : 2 * side, side : 2 * side] = np.kron(p, r), np.kron(p, t)
        action[2 * side :, 2 * side :] = np.kron(t, r)
        image, image_sign = np.abs(action).argmax(axis=0), action.sum(axis=0)
        leader, sign = np.full(size, -1), np.zeros(size)
        consistent = True
        for entry in range(size):
            at, value = entry, 1.0
            while leader[at] < 0:
                leader[at], sign[at] = entry, value
                at, value = image[at], value * image_sign[at]
            consistent &= leader[at] != entry or sign[at] == value  # else the entry would have to be zero
        if consistent:
            return leader, sign


def start(shape: Shape, rng: np.random.Generator) -> Chains:
    """Random candidates, most of them symmetric, the better ones of many."""
    size, many = 2 * shape.inputs * shape.colluders + shape.colluders**2, 8 * CHAINS
    reach = rng.integers(1, 6, (many, 1))
    chains = Chains(np.round(rng.uniform(-1.0, 1.0, (many, size)) * (reach + 0.5)), np.empty(0), np.empty(0)).free()
    for index in range(many // 4, many):
        chains.leader[index], chains.sign[index] = symmetry(shape, rng)
    genes = np.take_along_axis(chains.genes, chains.leader, axis=1) * chains.sign
    return chains._replace(genes=genes).take(np.argsort(shape.cost(genes), kind="stable")[:CHAINS])


def propose(shape: Shape, chains: Chains, rng: np.random.Generator) -> Array:
    """One step per chain: an entry and those bound to it move, alone or with C so that D moves less or not at all."""
    genes, (count, size) = chains.genes, chains.genes.shape
    side, every = shape.inputs * shape.colluders, np.arange(count)
    entry = rng.integers(0, size, count)
    step = rng.choice([-3, -2, -1, 1, 2, 3], count, p=[0.05, 0.1, 0.35, 0.35, 0.1, 0.05]).astype(float)
    kind = rng.random(count)
    jump = (kind < 0.06) & (entry < 2 * side)  # a new value instead of a step
    step = np.where(jump, rng.integers(-6, 7, count) - genes[every, entry], step)
    bound = chains.leader == chains.leader[every, entry][:, None]
    moved: Array = genes + bound * chains.sign * (step * chains.sign[every, entry])[:, None]
    a, b, c = shape.split(moved)
    before_a, before_b, _ = shape.split(genes)
    delta = np.swapaxes(b, 1, 2) @ a - np.swapaxes(before_b, 1, 2) @ before_a
    share = np.where(kind > 0.75, 1.0, np.where(kind > 0.5, 0.5, 0.0))[:, None, None]
    moved[:, 2 * side :] = (c - np.trunc(delta * share)).reshape(count, -1)
    return moved


def anneal(shape: Shape, chains: Chains, rng: np.random.Generator, hot: float, steps: int, survivors: int) -> Chains:
    """One stage: all chains cool together. Returns the best that they saw, best first."""
    cost = shape.cost(chains.genes)
    record, record_cost = chains.genes.copy(), cost.copy()
    for step in range(steps):
        temperature = hot * (COLD / hot) ** (step / steps)
        moved = propose(shape, chains, rng)
        moved_cost = shape.cost(moved)
        accept = rng.random(len(cost)) < np.exp(np.minimum((cost - moved_cost) / temperature, 0.0))
        chains.genes[accept], cost[accept] = moved[accept], moved_cost[accept]
        better = cost < record_cost
        record[better], record_cost[better] = chains.genes[better], cost[better]
    order = np.argsort(record_cost, kind="stable")
    distinct = [i for n, i in enumerate(order) if not (record[order[:n]] == record[i]).all(axis=1).any()]
    return chains._replace(genes=record).take(np.array(distinct[:survivors]))


def round_of(shape: Shape, best: Best, rng: np.random.Generator, reheat: bool) -> None:
    """Stages from random candidates, or from the best known; each goes on from copies of the survivors of the last."""
    known = best.genes()
    if reheat and known is not None:
        chains, stages = Chains(known[None], np.empty(0), np.empty(0)).free(), STAGES[1:]
    else:
        chains, stages = start(shape, rng), STAGES
    for number, stage in enumerate(stages):
        chains = chains.take(np.arange(CHAINS) % len(chains.genes))
        if number == len(stages) - 1:
            chains = chains.free()
        chains = anneal(shape, chains, rng, *stage)
    for candidate in chains.genes:
        best.offer(candidate)
        best.offer(descend(shape, candidate))


def descend(shape: Shape, genes: Array) -> Array:
    """Steepest descent over all steps of one entry and of pairs of entries by one."""
    size = len(genes)
    eye = np.eye(size)
    single = np.concatenate([scale * eye for scale in (-2, -1, 1, 2)])
    first, second = np.triu_indices(size, 1)
    pairs = np.concatenate([eye[first] + eye[second], eye[first] - eye[second]])
    steps = np.concatenate([single, pairs, -pairs])
    cost = float(shape.cost(genes[None])[0])
    while True:
        near = genes + steps
        costs = np.concatenate([shape.cost(part) for part in np.array_split(near, 1 + len(near) // 256)])
        if not costs.min() < cost - 1e-9:
            return genes
        genes, cost = near[costs.argmin()], float(costs.min())


def search(
    inputs: int, colluders: int, known: Entry | None, seconds: float, rounds: int | None, seed: int
) -> Entry | None:
    """The best code without spares found within the budget."""
    shape = Shape(inputs, colluders)
    best, begun, done = Best(shape, known), time.monotonic(), 0
    while done < rounds if rounds is not None else time.monotonic() - begun < seconds:
        rng = np.random.default_rng([seed, inputs, colluders, done])
        round_of(shape, best, rng, reheat=done % 3 == 2)
        done += 1
        found = f"{best.entry['amplification']:.2f}" if best.entry else "none"
        say(f"K={inputs} M={colluders} round {done} {time.monotonic() - begun:.0f}s amplification {found}")
    return best.entry


class Spare(NamedTuple):
    """Rows that extend one side of the code: what they add to the merit, the side's worst factor with them."""

    merit: float
    factor: float
    rows: Rows


def spare_rows(mix: Array, inputs: int, factor: float, rng: np.random.Generator, keep: int) -> list[Spare]:
    """Up to `keep` rows that extend `mix`, best first; `factor` is the worst so far."""
    colluders = mix.shape[1] - inputs
    reach = SPARE_REACH[colluders]
    grid = np.indices((2 * reach + 1,) * colluders).reshape(colluders, -1).T - reach
    others = np.array(list(combinations(range(len(mix)), colluders - 1)))
    noise = mix[:, inputs:]
    rows = [[np.zeros(len(others))] * colluders, *(noise[others[:, i]].T for i in range(colluders - 1))]
    minors = np.array(adjugate_rows(rows)[0]).T @ grid.T  # (coalition, noise row)
    own = np.array([determinant([list(row) for row in rows]) for rows in combinations(noise.tolist(), colluders)])
    room = max(DIVISOR_BITS, float(SMOOTH.bits(own[:, None])[0])) + 4  # an overestimate: the exact test comes last
    usable = (minors != 0).all(axis=0)
    grid, minors = grid[usable], minors[:, usable]
    bits = SMOOTH.bits(minors)  # cheap, and less than with the rows that are there
    grid, minors = grid[bits <= room], minors[:, bits <= room]
    if not len(grid):
        return []
    bits = SMOOTH.bits(np.vstack([np.repeat(own[:, None], len(grid), axis=1), minors]))
    grid, bits = grid[bits <= room], bits[bits <= room]

    signs = rng.choice([-1, 1], (12, inputs))
    rough = np.array([spare_factor(mix, inputs, others, signs, row).min() for row in grid])
    planes = hyperplanes(mix)
    found: list[Spare] = []
    for index in np.argsort(0.5 * np.log(np.maximum(rough, factor)) + divisor_price(bits), kind="stable")[: 20 * keep]:
        spare = fill(mix, inputs, factor, grid[index], others, planes, rng)
        if spare is not None:
            found.append(spare)
        if sum(spare.factor <= factor for spare in found) >= keep:
            break
    return sorted(found)[:keep]


def hyperplanes(mix: Array) -> Array:
    """Unit normals of the spans of all K + M - 1 rows: a new row must lie on none of them."""
    index = np.array(list(combinations(range(len(mix)), mix.shape[1] - 1)))
    return np.asarray(np.linalg.svd(mix[index].astype(float))[2][:, -1])


def fill(
    mix: Array, inputs: int, factor: float, noise_row: Array, others: Array, planes: Array, rng: np.random.Generator
) -> Spare | None:
    """Draw the data entries of a spare row: within the factor if they can, then as far from singular as they can."""
    size = divisor(np.vstack([mix[:, inputs:], noise_row]), 1 << DIVISOR_BITS)
    if size > 1 << DIVISOR_BITS:
        return None
    reach = np.where(np.arange(SPARE_DRAWS) % 2, 4, 12)[:, None]
    values = rng.integers(1, reach + 1, (SPARE_DRAWS, inputs)) * rng.choice([-1, 1], (SPARE_DRAWS, inputs))
    rows = np.hstack([values, np.tile(noise_row, (SPARE_DRAWS, 1))])
    distance = np.abs(rows @ planes.T).min(axis=1)
    small = np.argsort(np.abs(values).sum(axis=1) + np.where(distance < 1e-6, 1e3, 0.0), kind="stable")
    order = np.concatenate([np.argsort(-distance)[:48], small[:48]])
    factors = np.maximum(spare_factor(mix, inputs, others, values[order], noise_row), factor)
    for draw in np.lexsort((-distance[order], factors))[:3]:
        row = rows[order[draw]].tolist()
        cond = condition_with(mix, row)
        if cond < CONDITION_LIMIT[True]:
            price = float(divisor_price(math.log2(size))) + DECADE * math.log10(cond)
            return Spare(0.5 * math.log(factors[draw]) + price, float(factors[draw]), [row])
    return None


def spare_factor(mix: Array, inputs: int, others: Array, values: Array, row: Array) -> Array:
    """Worst factor over the coalitions that hold the new row, per draw of its data entries."""
    block = np.concatenate([np.broadcast_to(row, (len(others), 1, len(row))), mix[others, inputs:]], axis=1)
    inverse = np.linalg.inv(block.astype(float))  # (coalition, noise, member)
    rest = inverse[:, :, 1:] @ mix[others, :inputs]
    spread = rest[None] + inverse[None, :, :, :1] * values[:, None, None, :]
    leak = np.abs(np.swapaxes(spread, -1, -2) @ spread)
    return np.asarray(leak.sum(axis=(-1, -2)).max(axis=1))


def condition_with(mix: Array, row: list[int]) -> float:
    """The largest condition number over the square blocks that hold the new row."""
    index = np.array(list(combinations(range(len(mix)), mix.shape[1] - 1)))
    blocks = np.concatenate([np.broadcast_to(np.array(row), (len(index), 1, len(row))), mix[index]], axis=1)
    singular = np.linalg.svd(blocks.astype(float), compute_uv=False)
    return float((singular[:, 0] / np.maximum(singular[:, -1], 1e-12)).max())


def spares_for(mix: Array, inputs: int, factor: float, count: int, rng: np.random.Generator) -> Spare | None:
    """The best `count` rows that extend one side, among those that begin with one of the best few first rows."""
    first = spare_rows(mix, inputs, factor, rng, 8)
    if count == 1:
        return first[0] if first else None
    both = []
    for spare in first:
        rest = spares_for(np.vstack([mix, *spare.rows]), inputs, spare.factor, count - 1, rng)
        if rest is not None:
            both.append(rest._replace(rows=spare.rows + rest.rows))
            if len(both) == 3:
                break
    return min(both, default=None)


def extend(entry: Entry, count: int, seed: int) -> Entry | None:
    """The entry without spares, extended by `count` of them; A and B are extended apart."""
    inputs = entry["inputs"]
    a, b, c = (np.array(entry[key]) for key in ("a", "b", "C"))
    rng = np.random.default_rng([seed, inputs, entry["colluders"], count])
    sides = []
    for mix, scale in zip(code(a, b, c, [], []), (entry["scale_A"], entry["scale_B"]), strict=True):
        sides.append(spares_for(mix, inputs, (scale - 1e-10) ** 2, count, rng))  # stays below after round_up
    if sides[0] is None or sides[1] is None:
        return None
    return make_entry(a, b, c, sides[0].rows, sides[1].rows)


# --- the table --------------------------------------------------------------------------------------------------------


def read_table(path: Path) -> list[Entry]:
    return list(json.loads(path.read_text())["entries"]) if path.exists() else []


def write_table(path: Path, entries: list[Entry]) -> None:
    """Sorted by (M, K, E), one entry a line."""
    entries = sorted(entries, key=lambda entry: (entry["colluders"], entry["inputs"], entry["spares"]))
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(f'{{"format": 1, "comment": {json.dumps(COMMENT)}, "entries": [\n{lines}\n]}}\n')
    fresh.replace(path)  # a reader never sees half a table


def summary(entries: list[Entry]) -> str:
    lines = [" K  M  E        amp  scale_A  scale_B            L_A            L_B       cond"]
    for e in entries:
        lines.append(
            f"{e['inputs']:>2} {e['colluders']:>2} {e['spares']:>2} {e['amplification']:>10.2f} {e['scale_A']:>8.4f} "
            f"{e['scale_B']:>8.4f} {e['divisor_A']:>14} {e['divisor_B']:>14} {e['condition']:>10.1f}"
        )
    return "\n".join(lines)


# --- verification, written apart from the search ----------------------------------------------------------------------


def solve_exact(matrix: list[list[Fraction]], right: list[list[Fraction]]) -> list[list[Fraction]] | None:
    """matrix^-1 right by elimination over the rationals, or None when the matrix is singular."""
    size = len(matrix)
    rows = [[*left, *extra] for left, extra in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = next((i for i in range(column, size) if rows[i][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for i in range(size):
            if i != column and rows[i][column]:
                rows[i] = [x - rows[i][column] * y for x, y in zip(rows[i], rows[column], strict=True)]
    return [row[size:] for row in rows]


def determinant(rows: Rows) -> int:
    """Exactly, without fractions (Bareiss)."""
    rows, sign, last = [list(row) for row in rows], 1, 1
    for k in range(len(rows) - 1):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k]), None)
        if pivot is None:
            return 0
        if pivot != k:
            rows[k], rows[pivot], sign = rows[pivot], rows[k], -sign
        for i in range(k + 1, len(rows)):
            for j in range(k + 1, len(rows)):
                rows[i][j] = (rows[i][j] * rows[k][k] - rows[i][k] * rows[k][j]) // last
        last = rows[k][k]
    return sign * rows[-1][-1]


def exact_side(mix: Rows, inputs: int, where: str) -> tuple[Fraction, int]:
    """Over the rationals: the worst factor of the coalitions of at most M rows, and the divisor."""
    colluders = len(mix[0]) - inputs
    worst, lcm = Fraction(0), 1
    for size in range(1, colluders + 1):
        eye = [[Fraction(int(i == j)) for j in range(size)] for i in range(size)]
        for members in combinations(mix, size):
            data = [row[:inputs] for row in members]
            noise = [[Fraction(x) for x in row[inputs:]] for row in members]
            gram = [[Fraction(sum(x * y for x, y in zip(u, v, strict=True))) for v in noise] for u in noise]
            middle = solve_exact(gram, eye)
            if middle is None:
                raise CheckError(f"{where}: the noise of a coalition of {size} is singular. Search this entry again.")
            left = [[sum(data[m][i] * middle[m][n] for m in range(size)) for n in range(size)] for i in range(inputs)]
            leak = [sum(row[n] * data[n][j] for n in range(size)) for row in left for j in range(inputs)]
            worst = max(worst, sum((abs(Fraction(value)) for value in leak), Fraction(0)))
            if size == colluders:
                inverse = solve_exact(noise, eye) or []
                lcm = math.lcm(lcm, *(value.denominator for row in inverse for value in row))
    return worst, lcm


class CheckError(Exception):
    """The table does not hold what it states."""


def require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise CheckError(f"{where}: {what}. Search this entry again.")


def check_entry(entry: Entry) -> None:
    """Raise unless the entry is what its fields say: exactly for B^T A, minors, ranks, factors and divisors."""
    inputs, colluders, spares = entry["inputs"], entry["colluders"], entry["spares"]
    where = f"inputs={inputs} colluders={colluders} spares={spares}"
    a, b, c, width = entry["a"], entry["b"], entry["C"], inputs + colluders
    shapes = {"a": (inputs, colluders), "b": (inputs, colluders), "C": (colluders, colluders)}
    shapes |= {"spare_A": (spares, width), "spare_B": (spares, width)}
    for key, (height, length) in shapes.items():
        fits = len(entry[key]) == height and all(len(row) == length for row in entry[key])
        require(fits, where, f"{key} is not {height} by {length}")
        whole = all(type(value) is int for row in entry[key] for value in row)
        require(whole, where, f"{key} has an entry that is no integer")

    eye = [[int(i == j) for j in range(width)] for i in range(width)]
    inner = [[sum(a[k][i] * b[k][j] for k in range(inputs)) for j in range(colluders)] for i in range(colluders)]
    d = [[-inner[i][j] - c[j][i] for j in range(colluders)] for i in range(colluders)]
    carriers = eye[inputs:]
    mix_a = [eye[k][:inputs] + a[k] for k in range(inputs)]
    mix_a += [[-b[k][m] for k in range(inputs)] + c[m] for m in range(colluders)] + carriers + entry["spare_A"]
    mix_b = [eye[k][:inputs] + b[k] for k in range(inputs)] + carriers
    mix_b += [[-a[k][m] for k in range(inputs)] + d[m] for m in range(colluders)] + entry["spare_B"]
    used = inputs + 2 * colluders
    product = [[sum(mix_b[w][i] * mix_a[w][j] for w in range(used)) for j in range(width)] for i in range(width)]
    wanted = [[int(i == j and i < inputs) for j in range(width)] for i in range(width)]
    require(product == wanted, where, "B^T A is not diag(I, 0)")

    for side, mix in (("A", mix_a), ("B", mix_b)):
        worst, lcm = exact_side(mix, inputs, where)
        require(worst <= Fraction(str(entry[f"scale_{side}"])) ** 2, where, f"scale_{side} leaves a factor above 1")
        require(lcm == entry[f"divisor_{side}"] <= 1 << DIVISOR_BITS, where, f"divisor_{side} should be {lcm}")
        regular = all(determinant(list(rows)) for rows in combinations(mix, width))
        require(regular, where, f"some {width} rows of {side} are singular")

    norms = [sum(x * x for x in u[inputs:]) * sum(y * y for y in v[inputs:]) for u, v in zip(mix_a, mix_b, strict=True)]
    amp = entry["scale_A"] * entry["scale_B"] * math.sqrt(sum(norms[:used]))
    require(math.isclose(amp, entry["amplification"], rel_tol=1e-4), where, f"amplification should be {amp:.4f}")
    cond = max(condition(np.array(mix)) for mix in (mix_a, mix_b))
    require(cond <= CONDITION_LIMIT[spares > 0], where, f"condition {cond:.3g} is above its limit")
    require(math.isclose(cond, entry["condition"], rel_tol=1e-3), where, f"condition should be {cond:.2f}")


def check(path: Path) -> list[Entry]:
    """Verify a table, entry by entry, and return it."""
    table = json.loads(path.read_text())
    require(table["format"] == 1, str(path), f"format {table['format']} where 1 is known")
    entries: list[Entry] = table["entries"]
    keys = [(entry["colluders"], entry["inputs"], entry["spares"]) for entry in entries]
    require(keys == sorted(set(keys)), str(path), "entries are not sorted by (colluders, inputs, spares), or repeat")
    for entry in entries:
        check_entry(entry)
    return entries


# --- command line -----------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def improve(entries: list[Entry], inputs: int, colluders: int, options: argparse.Namespace) -> list[Entry]:
    """The table with the group (inputs, colluders) searched again; kept as it is when nothing better turns up."""
    group = {e["spares"]: e for e in entries if (e["inputs"], e["colluders"]) == (inputs, colluders)}
    known = group.get(0)
    base = search(inputs, colluders, known, options.seconds, options.rounds, options.seed)
    if base is None:
        return entries
    if base is not known:
        group = {0: base}
    for count in SPARES[colluders][1:]:
        if count not in group:
            extended = extend(base, count, options.seed)
            if extended is not None:
                group[count] = extended
            say(f"K={inputs} M={colluders} E={count} {'found' if extended else 'not found'}")
    return [e for e in entries if (e["inputs"], e["colluders"]) != (inputs, colluders)] + list(group.values())


def pair(text: str) -> tuple[int, int]:
    inputs, colluders = (int(part) for part in text.split(","))
    return inputs, colluders


def main() -> None:
    parser = argparse.ArgumentParser(description="Search for, or verify, the coefficients of the real masking code.")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the search of one (K, M); default 60")
    parser.add_argument("--rounds", type=int, help="rounds of one (K, M) instead of a time: reproducible")
    parser.add_argument("--only", type=pair, action="append", metavar="K,M", help="search only this group; may repeat")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", type=Path, default=TABLE, help="the JSON file to read and write")
    parser.add_argument("--check", action="store_true", help="verify the table and print it; search nothing")
    options = parser.parse_args()
    if not options.check:
        for inputs, colluders in options.only or GROUPS:
            entries = read_table(options.table)
            write_table(options.table, improve(entries, inputs, colluders, options))
    print(summary(check(options.table)))


if __name__ == "__main__":
    main()
