"""Masking in F_p: encode, decode, and the weight gradient.

Guarantees: the joint distribution of the shares of any M workers, of x and of delta, is uniform and the same for all
    data (contract test: tests/coding/test_privacy_exact.py).
Assumes: the noise is uniform, fresh and used once; every M x M minor of the noise blocks is non-zero (verified when the
    code is built); decoded results are verified before anything depends on them.
Leaks: shapes; and, to M+1 or more pooled shares, the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from darknight.coding.code import Code, Mixing, decoder, same_shape
from darknight.kernels import combine
from darknight.randomness import Stream, uniform_below


def encode(mixing: Mixing, groups: Tensor, prime: int, stream: Stream, *, rows: Sequence[int] | None = None) -> Tensor:
    """Shares xbar = A [x; r] (Eq. 2): quantised (group, input, *feature) -> (worker, group, *feature), in [0, prime).

    `groups` are integers of magnitude below the prime; the noise comes from `stream`. rows: only these workers' shares,
    in this order.
    """
    chosen = mixing.rows if rows is None else [mixing.rows[row] for row in rows]
    noise = uniform_below(stream, (mixing.colluders, groups.shape[0], *groups.shape[2:]), prime)
    shares = torch.empty(len(chosen), groups.shape[0], *groups.shape[2:], dtype=torch.int32)
    return combine(_integers(chosen), [*groups.unbind(1), *noise], prime, out=shares, centred=False)


def decode(mixing: Mixing, replies: Mapping[int, Tensor], prime: int) -> Tensor:
    """y = L ybar (Eq. 3): answers (group, *feature) by worker -> centred integers (group, input, *feature), int32."""
    rows, matrix = decoder(mixing, prime, replies)
    some = same_shape([replies[row] for row in rows])
    results = torch.empty(some.shape[0], mixing.inputs, *some.shape[1:], dtype=torch.int32)
    combine(_integers(matrix), [replies[row] for row in rows], prime, out=results.transpose(0, 1), centred=True)
    return results


def decode_gradient(code: Code, replies: Mapping[int, Tensor]) -> Tensor:
    """grad W = sum_j Eq_j over the base workers (Eq. 4 to 6, gamma folded into B), as centred integers, int32.

    A sum and not a mean, because the loss already averages.
    """
    assert code.prime is not None
    equations = [replies[row] for row in code.grad_rows]
    total = torch.empty(1, *same_shape(equations).shape, dtype=torch.int32)
    return combine([[1] * len(equations)], equations, code.prime, out=total, centred=True)[0]


def syndromes(checks: Sequence[Sequence[int]], answers: Sequence[Tensor], prime: int) -> Tensor:
    """sum_j h_j ybar_j mod prime for each parity check h, in [0, prime): zero exactly if the answers are a codeword."""
    out = torch.empty(len(checks), *same_shape(answers).shape, dtype=torch.int32)
    return combine(checks, answers, prime, out=out, centred=False)


def _integers(matrix: Sequence[Sequence[object]]) -> list[list[int]]:
    return [[int(value) for value in row] for row in matrix]  # type: ignore[call-overload]
