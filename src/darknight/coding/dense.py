"""The dense code, the paper's: every share mixes all inputs, under fresh secret coefficients for every masking.

Field: a random invertible Z (base, base); A = Z[:, :K+M]; B = columns 0..K-1 and K+M..K+2M-1 of Z^-T.
Real: an orthogonal Z whose noise columns are flat, +-1/sqrt(base), the rest Haar on their complement; Z^-T = Z. (The
paper samples until the coefficients' ratio is bounded; beyond four workers that does not end.)

Spare rows follow the base rows, have noise of the same size, and take no part in weight gradients.
"""

from __future__ import annotations

from dataclasses import replace
from math import comb, sqrt

import torch
from torch import Tensor

from darknight.coding.algebra import IntMatrix, all_minors_nonzero, inverse, transpose
from darknight.coding.code import Code, Mixing
from darknight.coding.systematic import worst_condition
from darknight.errors import SchemeError
from darknight.randomness import Stream, haar_orthogonal, random_signs, standard_normal, uniform_below

_ATTEMPTS = 1000
_WORST_CONDITION = 10.0


def field_dense(stream: Stream, inputs: int, colluders: int, spares: int, prime: int, masked: bool) -> Code:
    K, M = inputs, colluders
    base = K + (2 if masked else 1) * M
    for _ in range(_ATTEMPTS):
        Z = _uniform_matrix(stream, base, base, prime)
        Z_inverse = inverse(Z, prime)
        if Z_inverse is None:
            continue
        dual = transpose(Z_inverse)
        extra_A = _uniform_matrix(stream, spares, K + M, prime)
        A = _mixing([*(row[: K + M] for row in Z), *extra_A], K)
        if masked:
            extra_B = _uniform_matrix(stream, spares, K + M, prime)
            B = _mixing([*(row[:K] + row[K + M :] for row in dual), *extra_B], K)
        else:
            B = Mixing((*(row[:K] for row in dual), *((0,) * K,) * spares), ((),) * (base + spares), tuple(range(K)))
        code = Code(prime, A, B, tuple(range(base)))
        if all(_sound(mixing, prime) for mixing in code.masking):
            return code
    raise SchemeError(f"no dense code over F_{prime} was found; the prime is too small for {base + spares} workers.")


def real_dense(stream: Stream, inputs: int, spares: int, masked: bool) -> Code:
    """M=1. With masked gradients the base must be even, so that two flat columns can be orthogonal."""
    K = inputs
    base = K + (2 if masked else 1)
    workers = base + spares
    # The worst of n sets of answers is about n times worse than a typical one.
    limit = _WORST_CONDITION * comb(workers, workers - K - 1)
    for _ in range(_ATTEMPTS):
        flat = _flat_columns(stream, base, 2 if masked else 1)
        data = haar_orthogonal(stream, flat, K)
        extra_A, extra_B = (_spare_rows(stream, spares, K, base) for _ in range(2))
        A = _real_mixing(data, flat[:, :1], extra_A)
        if masked:
            B = _real_mixing(data, flat[:, 1:], extra_B)
        else:
            rows = [*data.tolist(), *[[0.0] * K] * spares]
            B = Mixing(tuple(map(tuple, rows)), ((),) * workers, tuple(range(base)))
        code = Code(None, A, B, tuple(range(base)))
        if all(worst_condition(mixing) <= limit for mixing in code.masking):
            return code
    raise SchemeError(f"no well-conditioned dense code with {spares} spares was found. Lower spares.")


def flat_code(inputs: int, base: int, masked: bool) -> Code:
    """A stand-in without secrets that has the noise of the dense real code: to judge its precision beforehand."""
    mixing = Mixing(((1.0,) * inputs,) * base, ((1,),) * base, tuple(range(base)), unit=1 / sqrt(base))
    return Code(None, mixing, mixing if masked else replace(mixing, noise=((),) * base), tuple(range(base)))


def _flat_columns(stream: Stream, rows: int, columns: int) -> Tensor:
    """Orthonormal columns with entries +-1/sqrt(rows): random signs, and for a second column half of them flipped."""
    first = random_signs(stream, rows)
    if columns == 1:
        return first[:, None] / sqrt(rows)
    order = standard_normal(stream, (rows,)).argsort()
    flips = torch.ones(rows, dtype=torch.float64)
    flips[order[: rows // 2]] = -1.0
    return torch.stack([first, first * flips], dim=1) / sqrt(rows)


def _spare_rows(stream: Stream, spares: int, inputs: int, base: int) -> Tensor:
    """(spare, input + 1): a random direction of the length that base rows have, and a sign for the noise."""
    directions = standard_normal(stream, (spares, inputs))
    directions *= sqrt(1 - 1 / base) / directions.norm(dim=1, keepdim=True)
    return torch.cat([directions, random_signs(stream, spares)[:, None]], dim=1)


def _real_mixing(data: Tensor, flat: Tensor, extra: Tensor) -> Mixing:
    blocks = torch.cat([data, extra[:, :-1]]).tolist()
    signs = torch.cat([flat[:, 0].sign(), extra[:, -1]]).to(torch.int64).tolist()
    return Mixing(
        tuple(map(tuple, blocks)), tuple((sign,) for sign in signs), tuple(range(len(data))), unit=1 / sqrt(len(data))
    )


def _uniform_matrix(stream: Stream, rows: int, columns: int, prime: int) -> IntMatrix:
    return tuple(map(tuple, uniform_below(stream, (rows, columns), prime).tolist()))


def _mixing(rows: list[tuple[int, ...]], inputs: int) -> Mixing:
    sources = len(rows[0])
    return Mixing(tuple(row[:inputs] for row in rows), tuple(row[inputs:] for row in rows), tuple(range(sources)))


def _sound(mixing: Mixing, prime: int) -> bool:
    """No coalition meets a singular noise block, and the base rows decode."""
    base = [[int(value) for value in mixing.rows[j]] for j in mixing.base]
    return all_minors_nonzero(mixing.noise, prime) and inverse(base, prime) is not None
