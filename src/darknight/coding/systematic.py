"""The systematic code: each input stays in its own share; privacy comes from the noise block alone.

            inputs  noise                    inputs  noise
    A =  [   I_K     a   ]  K rows    B = [   I_K     b   ]  K rows  data workers
         [  -b^T     C   ]  M rows        [    0     I_M  ]  M rows  carriers of s
         [    0     I_M  ]  M rows        [  -a^T     D   ]  M rows  carriers of r      D = -(a^T b) - C^T

B^T A = diag(I_K, 0), and every M x M minor of [a; C; I] and [b; I; D], spare rows included, is non-zero. Coefficients
are public constants. Departs from the paper, which mixes the inputs with each other: that adds nothing to the
guarantee.

With gradients in the clear, or for inference, A = [I a; 0 I] and B = [I; -a^T].
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from math import comb, inf, lcm

import torch

from darknight.coding.algebra import IntMatrix, all_minors_nonzero, inverse, parity_check
from darknight.coding.code import Code, Mixing
from darknight.coding.real_table import real_entry
from darknight.errors import SchemeError

SpareRows = tuple[tuple[int | Fraction, ...], ...]
Blocks = tuple[IntMatrix, IntMatrix, IntMatrix, SpareRows, SpareRows]  # a, b, C, spare rows of A, of B

_MOST_ROW_SETS = 200_000
_WORST_CONDITION = 1e6
_ATTEMPTS = 100
_TRIES = 8
_LARGEST_DIVISOR = 1 << 40


@lru_cache(maxsize=256)
def field_systematic(inputs: int, colluders: int, spares: int, prime: int, masked: bool) -> Code:
    """The code over F_p, verified: all noise minors, and that any K+M rows decode."""
    if colluders == 1:
        code = _assemble(*_field_single(inputs, spares), masked, prime=prime)
        return _verified_field(code, proven=_vandermonde(inputs, spares, prime))
    refuse_if_endless(inputs, colluders, spares, masked)
    for attempt in range(_ATTEMPTS):
        code = _assemble(*_field_drawn(inputs, colluders, spares, attempt), masked, prime=prime)
        with suppress(SchemeError):
            return _verified_field(code, proven=False)
    raise SchemeError(
        f"no coefficients for inputs={inputs}, colluders={colluders}, spares={spares}. Lower one of them."
    )


@lru_cache(maxsize=256)
def real_systematic(inputs: int, colluders: int, spares: int, masked: bool) -> Code:
    """The code over the reals: constants for M=1, the shipped table for M >= 2, verified."""
    if colluders == 1:
        refuse_if_endless(inputs, colluders, spares, masked)
        codes = (
            _assemble(*_real_single(inputs, spares, n), masked, prime=None) for n in range(_TRIES if spares else 1)
        )
        return _verified_real(min(codes, key=lambda code: max(map(worst_condition, code.masking))))
    entry = real_entry(inputs, colluders, spares)
    blocks: Blocks = (entry.a, entry.b, entry.C, entry.spares_of_inputs, entry.spares_of_gradients)
    return _verified_real(_assemble(*blocks, masked, prime=None, units=entry.units))


def _field_single(inputs: int, spares: int) -> Blocks:
    """M=1: x_j + r; sum x + (K+1) r; r  and  delta_j - s; s; -(sum delta + s). No multiplication.

    Written in the shares of the base rows, the other rows are (1^e .. K^e, (K+1)^e) for A and the same with the last
    entry times (K+1) for B, e = 0..E: Vandermonde, so any K+M rows decode.
    """
    K = inputs
    powers = [[j**e for j in range(1, K + 1)] for e in range(1, spares + 1)]
    extra_A = tuple((*row, (K + 1) ** e + sum(row)) for e, row in enumerate(powers, start=1))
    extra_B = tuple((*row, (K + 1) ** (e + 1) - sum(row)) for e, row in enumerate(powers, start=1))
    return ((1,),) * K, ((-1,),) * K, ((K + 1,),), extra_A, extra_B


def _vandermonde(inputs: int, spares: int, prime: int) -> bool:
    """Whether "any K+M rows decode" needs no enumeration.

    Minors of (j^e), e = 0..3, are a Vandermonde determinant times powers of nodes times a Schur polynomial of degree at
    most 2 with at most 3 unit terms: positive integers of at most 3 (K+1)^2, so not multiples of a larger prime.
    """
    return spares <= 3 and 3 * (inputs + 1) ** 2 < prime


def _field_drawn(inputs: int, colluders: int, spares: int, attempt: int) -> Blocks:
    """M >= 2: public pseudo-random entries in 1..999 from a fixed seed."""
    K, M, E = inputs, colluders, spares
    numbers = iter(_public_numbers(f"field/{K}/{M}/{E}/{attempt}", 2 * K * M + M * M + 2 * E * (K + M), 999))

    def block(rows: int, columns: int) -> IntMatrix:
        return tuple(tuple(next(numbers) for _ in range(columns)) for _ in range(rows))

    return block(K, M), block(K, M), block(M, M), block(E, K + M), block(E, K + M)


def _real_single(inputs: int, spares: int, attempt: int) -> Blocks:
    """M=1: a_j = 1, b_j = (-1)^(j+1), C = K, so D = -(K + K mod 2): every row leaks at most C1^2 / (2 sigma^2).

    A spare row holds public pseudo-random fractions of the inputs, under the noise of D.
    """
    K = inputs
    numbers = _public_numbers(f"real/{K}/1/{spares}/{attempt}", 2 * spares * K, 1 << 17)
    entries = [Fraction(n - (1 << 16), 1 << 16) for n in numbers]
    rows: list[tuple[int | Fraction, ...]] = [(*entries[i : i + K], K + K % 2) for i in range(0, len(entries), K)]
    signs = tuple(((-1) ** j,) for j in range(K))
    return ((1,),) * K, signs, ((K,),), tuple(rows[:spares]), tuple(rows[spares:])


def _public_numbers(label: str, count: int, largest: int) -> list[int]:
    """Public pseudo-random constants in 1..largest."""
    stream = hashlib.shake_256(f"darknight/coefficients/v1/{label}".encode()).digest(4 * count)
    return [1 + int.from_bytes(stream[i : i + 4], "big") % largest for i in range(0, len(stream), 4)]


def _assemble(
    a: IntMatrix,
    b: IntMatrix,
    C: IntMatrix,
    extra_A: SpareRows,
    extra_B: SpareRows,
    masked: bool,
    *,
    prime: int | None,
    units: tuple[float, float] = (1.0, 1.0),
) -> Code:
    K, M, E = len(a), len(C), len(extra_A)
    extra_A, extra_B = _centred(extra_A, prime), _centred(extra_B, prime)
    one_K, one_M = _identity(K), _identity(M)
    zero = ((0,) * K,) * M
    spare_A_data, spare_A_noise = tuple(row[:K] for row in extra_A), tuple(tuple(map(int, row[K:])) for row in extra_A)
    minus_a = tuple(tuple(-a[k][m] for k in range(K)) for m in range(M))
    if not masked:
        first = tuple(range(K + M))
        A = Mixing((*one_K, *zero, *spare_A_data), (*a, *one_M, *spare_A_noise), first, units[0])
        B = Mixing((*one_K, *minus_a, *((0,) * K,) * E), ((),) * (K + M + E), tuple(range(K)))
        return Code(prime, _with_divisor(A, prime), B, first)
    minus_b = tuple(tuple(-b[k][m] for k in range(K)) for m in range(M))
    D = tuple(tuple(-sum(a[k][m] * b[k][n] for k in range(K)) - C[n][m] for n in range(M)) for m in range(M))
    D = tuple(tuple(map(int, row)) for row in _centred(D, prime))
    spare_B_data, spare_B_noise = tuple(row[:K] for row in extra_B), tuple(tuple(map(int, row[K:])) for row in extra_B)
    data, carriers_s, carriers_r = range(K), range(K, K + M), range(K + M, K + 2 * M)
    A = Mixing(
        (*one_K, *minus_b, *zero, *spare_A_data), (*a, *C, *one_M, *spare_A_noise), (*data, *carriers_r), units[0]
    )
    B = Mixing(
        (*one_K, *zero, *minus_a, *spare_B_data), (*b, *one_M, *D, *spare_B_noise), (*data, *carriers_s), units[1]
    )
    return Code(prime, _with_divisor(A, prime), _with_divisor(B, prime), (*data, *carriers_s, *carriers_r))


def _centred(rows: SpareRows, prime: int | None) -> SpareRows:
    """Residues around zero, so that 1 and -1 stay what they are and none is too large for the kernels."""
    if prime is None:
        return rows
    return tuple(tuple((int(value) + prime // 2) % prime - prime // 2 for value in row) for row in rows)


def _identity(size: int) -> IntMatrix:
    return tuple(tuple(int(i == j) for j in range(size)) for i in range(size))


# --- verification: a code is handed out only after this ---------------------------------------------------------------
def refuse_if_endless(inputs: int, colluders: int, spares: int, masked: bool) -> None:
    redundant = (colluders if masked else 0) + spares
    workers = inputs + colluders + redundant
    if max(comb(workers, redundant), comb(workers, colluders)) > _MOST_ROW_SETS:
        raise SchemeError(
            f"inputs={inputs}, colluders={colluders}, spares={spares} has too many sets of workers to verify each. "
            "Lower inputs, colluders or spares."
        )


def _verified_field(code: Code, *, proven: bool) -> Code:
    """Raises SchemeError unless all noise minors are non-zero and any K+M rows decode."""
    prime = code.prime
    assert prime is not None
    for mixing in code.masking:
        if not all_minors_nonzero(mixing.noise, prime):
            raise SchemeError("a coalition of colluders would meet a singular noise block.")
        redundant = mixing.workers - len(mixing.base)
        if redundant and not proven:
            refuse_if_endless(mixing.inputs, mixing.colluders, redundant, masked=False)
            rows = [tuple(int(value) for value in row) for row in mixing.rows]
            if not all_minors_nonzero(parity_check(rows, mixing.base, prime), prime):
                raise SchemeError("a set of K+M answers would not decode. Lower spares.")
    return code


def _verified_real(code: Code) -> Code:
    """Raises SchemeError unless every coalition leaks at most C1^2 / (2 sigma^2) and any K+M rows decode stably."""
    for mixing in code.masking:
        refuse_if_endless(mixing.inputs, mixing.colluders, mixing.workers - len(mixing.base), masked=False)
        for coalition in combinations(range(mixing.workers), mixing.colluders):
            if leakage_factor(mixing, coalition) > 1 + 1e-9:
                raise SchemeError(f"coefficients: workers {coalition} would learn more than the stated bound.")
        if worst_condition(mixing) > _WORST_CONDITION:
            raise SchemeError("a set of K+M answers would decode with large errors. Lower spares or inputs.")
    return code


def leakage_factor(mixing: Mixing, coalition: tuple[int, ...]) -> float:
    """sum |Q_ij|, Q = A1^T (A2 A2^T)^-1 A1: the coalition learns at most factor * C1^2 / (2 sigma^2) nats a feature.

    For inputs within +-C1 with any dependence: log det(I + X) <= tr X, and tr(Q Sigma) <= C1^2 sum |Q_ij|. Infinite for
    a singular noise block.
    """
    data = torch.tensor([[float(value) for value in mixing.data[j]] for j in coalition], dtype=torch.float64)
    noise = torch.tensor([mixing.noise[j] for j in coalition], dtype=torch.float64) * mixing.unit
    if torch.linalg.matrix_rank(noise) < len(noise):
        return inf
    return float((data.T @ torch.linalg.inv(noise @ noise.T) @ data).abs().sum())


def worst_condition(mixing: Mixing) -> float:
    """How much an error in the answers can grow when any K+M of the workers answer, in orthonormal coordinates.

    The smallest singular value of the answering rows of an orthonormal basis is that of the missing rows of its
    complement, which is a much smaller matrix.
    """
    rows = torch.tensor([[float(value) for value in row] for row in mixing.rows], dtype=torch.float64)
    complement = torch.linalg.qr(rows, mode="complete").Q[:, rows.shape[1] :]
    if not complement.numel():
        return 1.0
    missing = torch.tensor(list(combinations(range(mixing.workers), complement.shape[1])))
    return float(1 / torch.linalg.svdvals(complement[missing])[:, -1].min().clamp_min(1e-300))


def _with_divisor(mixing: Mixing, prime: int | None) -> Mixing:
    """Real: the smallest L such that L times the inverse of every coalition's noise block is an integer matrix."""
    if prime is not None:
        return mixing
    divisor = 1
    for coalition in combinations(mixing.noise, mixing.colluders):
        inverted = inverse(coalition, None)
        if inverted is None:
            raise SchemeError("a coalition of colluders would meet a singular noise block.")
        divisor = lcm(divisor, *(Fraction(value).denominator for row in inverted for value in row))
    if divisor > _LARGEST_DIVISOR:
        raise SchemeError("coefficients whose noise blocks have no small common divisor. Lower inputs or spares.")
    return replace(mixing, divisor=divisor)
