"""Small exact linear algebra: over F_p with Python integers, over the rationals with fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, islice
from math import lcm
from typing import overload

import torch
from torch import Tensor

Number = int | Fraction
Matrix = tuple[tuple[Number, ...], ...]
IntMatrix = tuple[tuple[int, ...], ...]

_CHUNK = 1 << 15


@overload
def inverse(matrix: Sequence[Sequence[int]], prime: int) -> IntMatrix | None: ...


@overload
def inverse(matrix: Sequence[Sequence[Number]], prime: None) -> Matrix | None: ...


def inverse(matrix: Sequence[Sequence[Number]], prime: int | None) -> Matrix | None:
    """The inverse over F_p, or over the rationals when prime is None; None for a singular matrix."""
    return _rational_inverse(matrix) if prime is None else _inverse_modulo(matrix, prime)


def _inverse_modulo(matrix: Sequence[Sequence[Number]], prime: int) -> IntMatrix | None:
    size = len(matrix)
    work = [[int(value) % prime for value in row] + [int(i == j) for j in range(size)] for i, row in enumerate(matrix)]
    for column in range(size):
        if not _with_pivot(work, column):
            return None
        factor = pow(work[column][column], -1, prime)
        work[column] = [value * factor % prime for value in work[column]]
        for i in range(size):
            if i != column and work[i][column]:
                scale = work[i][column]
                work[i] = [(x - scale * y) % prime for x, y in zip(work[i], work[column], strict=True)]
    return tuple(tuple(row[size:]) for row in work)


def _rational_inverse(matrix: Sequence[Sequence[Number]]) -> Matrix | None:
    """By whole numbers, all of whose divisions leave no rest (Bareiss): fractions would be reduced after every step."""
    rows, scale = whole(matrix)
    size = len(rows)
    work = [row + [int(i == j) for j in range(size)] for i, row in enumerate(rows)]
    before = 1
    for column in range(size):
        if not _with_pivot(work, column):
            return None
        pivot, chosen = work[column][column], work[column]
        for i in range(size):
            if i != column:
                lead = work[i][column]
                work[i] = [(x * pivot - lead * y) // before for x, y in zip(work[i], chosen, strict=True)]
        before = pivot
    # What is left of the rows is the unit matrix times `before`, which is their determinant but for its sign.
    return tuple(tuple(Fraction(value * scale, before) for value in row[size:]) for row in work)


def whole(matrix: Sequence[Sequence[Number | float]]) -> tuple[list[list[int]], int]:
    """Whole numbers, and how many times the matrix they are.

    >>> whole([[0.5, 3], [Fraction(1, 3), -1.25]])
    ([[6, 36], [4, -15]], 12)
    """
    ratios = [[value.as_integer_ratio() for value in row] for row in matrix]
    scale = lcm(*(bottom for row in ratios for _, bottom in row))
    return [[top * (scale // bottom) for top, bottom in row] for row in ratios], scale


def _with_pivot(work: list[list[int]], column: int) -> bool:
    """Brings a row to its place in which this column is not zero, if there is one."""
    place = next((i for i in range(column, len(work)) if work[i][column]), None)
    if place is None:
        return False
    work[column], work[place] = work[place], work[column]
    return True


def multiply(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]], prime: int) -> IntMatrix:
    columns = list(zip(*right, strict=True))
    return tuple(
        tuple(sum(x * y for x, y in zip(row, column, strict=True)) % prime for column in columns) for row in left
    )


def transpose(matrix: Sequence[Sequence[int]]) -> IntMatrix:
    return tuple(tuple(column) for column in zip(*matrix, strict=True))


def all_minors_nonzero(matrix: Sequence[Sequence[int]], prime: int) -> bool:
    """Whether every set of as many rows as there are columns is invertible over F_p. Every set is tried."""
    table = torch.tensor([[value % prime for value in row] for row in matrix], dtype=torch.int64)
    rows, columns = table.shape
    sets = combinations(range(rows), columns)
    while chunk := list(islice(sets, _CHUNK)):
        if not bool(_invertible(table[torch.tensor(chunk)], prime).all()):
            return False
    return True


def parity_check(matrix: Sequence[Sequence[int]], base: Sequence[int], prime: int) -> IntMatrix:
    """Columns that annihilate the code: as many as there are rows beyond the base; one row for each worker.

    Any set of (number of columns of `matrix`) rows of `matrix` is invertible exactly if the rows of the result that
    belong to the other workers are.
    """
    solved = inverse([matrix[i] for i in base], prime)
    assert solved is not None
    others = [i for i in range(len(matrix)) if i not in base]
    weights = multiply([matrix[i] for i in others], solved, prime)  # others expressed in base rows
    result: list[tuple[int, ...]] = [()] * len(matrix)
    for place, worker in enumerate(base):
        result[worker] = tuple(-row[place] % prime for row in weights)
    for place, worker in enumerate(others):
        result[worker] = tuple(int(place == column) for column in range(len(others)))
    return tuple(result)


def _invertible(batch: Tensor, prime: int) -> Tensor:
    """Fraction-free elimination over F_p for a whole batch of square matrices at once."""
    batch = batch.clone()
    size = batch.shape[1]
    good = torch.ones(len(batch), dtype=torch.bool)
    every = torch.arange(len(batch))
    for column in range(size):
        place = column + (batch[:, column:, column] != 0).to(torch.int8).argmax(1)
        pivot, displaced = batch[every, place], batch[:, column].clone()
        good &= pivot[:, column] != 0
        batch[every, place], batch[:, column] = displaced, pivot
        below = batch[:, column + 1 :]
        lead = below[:, :, column, None] * pivot[:, None, :]
        batch[:, column + 1 :] = (below * pivot[:, column, None, None] - lead) % prime
    return good
