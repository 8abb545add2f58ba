"""Short vectors among the combinations of shares modulo a prime, by lattice reduction (LLL).

Shares of the dense code are random combinations of K inputs and M noise rows modulo p, under coefficients that nobody
sent. All combinations of all shares form a lattice. Inputs are small in it (10 bits of 28), and whatever contains noise
is not, so the shortest vectors are the inputs and small sums of them: the coefficients do not have to be known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LOVASZ = 99, 100


def reduced(basis: Sequence[Sequence[int]]) -> list[list[int]]:
    """An LLL-reduced basis of the lattice that the rows of `basis` span; they must be linearly independent.

    The integral version of the algorithm (Lenstra, Lenstra, Lovasz 1982; de Weger 1987): Gram-Schmidt coefficients are
    kept as integers over common denominators, so nothing is ever rounded.

    >>> reduced([[101, 0], [57, 1]])
    [[-5, 7], [8, 9]]
    """
    work = _Reduction(basis)
    numerator, denominator = _LOVASZ
    row = 1
    while row < len(work.basis):
        work.shorten(row, row - 1)
        below, here, above = work.dets[row - 1 : row + 2]
        if denominator * (above * below + work.lam[row][row - 1] ** 2) < numerator * here * here:
            work.swap(row)
            row = max(1, row - 1)
        else:
            for other in range(row - 2, -1, -1):
                work.shorten(row, other)
            row += 1
    return work.basis


class _Reduction:
    """dets[i]: the determinant of the first i rows' Gram matrix. mu_ij = lam[i][j] / dets[j + 1]."""

    def __init__(self, basis: Sequence[Sequence[int]]) -> None:
        self.basis = [list(row) for row in basis]
        count = len(self.basis)
        self.dets, self.lam = [1] * (count + 1), [[0] * count for _ in range(count)]
        for i in range(count):
            for j in range(i + 1):
                value = sum(a * b for a, b in zip(self.basis[i], self.basis[j], strict=True))
                for k in range(j):
                    value = (self.dets[k + 1] * value - self.lam[i][k] * self.lam[j][k]) // self.dets[k]
                self.lam[i][j] = value
            self.dets[i + 1] = self.lam[i][i]
            if not self.dets[i + 1]:
                raise ValueError("lattice: the rows are linearly dependent.")

    def shorten(self, row: int, by: int) -> None:
        """Take the nearest whole multiple of an earlier row from a row."""
        det = self.dets[by + 1]
        times = (2 * self.lam[row][by] + det) // (2 * det)
        if times:
            self.basis[row] = [a - times * b for a, b in zip(self.basis[row], self.basis[by], strict=True)]
            for j in range(by):
                self.lam[row][j] -= times * self.lam[by][j]
            self.lam[row][by] -= times * det

    def swap(self, row: int) -> None:
        """Swap a row with the one before it."""
        dets, lam = self.dets, self.lam
        self.basis[row], self.basis[row - 1] = self.basis[row - 1], self.basis[row]
        for j in range(row - 1):
            lam[row][j], lam[row - 1][j] = lam[row - 1][j], lam[row][j]
        mu = lam[row][row - 1]
        det = (dets[row - 1] * dets[row + 1] + mu * mu) // dets[row]
        for i in range(row + 1, len(self.basis)):
            old = lam[i][row]
            lam[i][row] = (dets[row + 1] * lam[i][row - 1] - mu * old) // dets[row]
            lam[i][row - 1] = (det * old + mu * lam[i][row]) // dets[row + 1]
        dets[row] = lam[row - 1][row - 1] = det
        lam[row][row] = dets[row + 1]


def echelon(rows: Tensor, prime: int, columns: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Combinations of the rows modulo the prime, and the columns, out of `columns`, on which they are unit vectors.

    rows: (row, column) residues below 2^31. Rows that depend on the others on `columns` are dropped.
    """
    rest, done, pivots = rows.to(torch.int64).remainder(prime), list[Tensor](), list[int]()
    for column in columns:
        usable = rest[:, column].nonzero()
        if not len(usable):
            continue
        first = int(usable[0])
        row = (rest[first] * pow(int(rest[first, column]), -1, prime)).remainder(prime)
        rest = torch.cat([rest[:first], rest[first + 1 :]])
        rest = (rest - rest[:, column, None] * row).remainder(prime)
        done = [*((other - other[column] * row).remainder(prime) for other in done), row]
        pivots.append(column)
    return torch.stack(done), pivots


def short_combinations(shares: Tensor, prime: int, *, count: int, columns: Sequence[int]) -> Tensor:
    """(worker, feature) residues -> (vector, feature) integers: the `count` shortest of a reduced basis.

    The lattice is searched on a few `columns`, which fix a combination; sixteen do for five sources.
    """
    rows, pivots = echelon(shares, prime, columns)
    others = [column for column in columns if column not in pivots]
    # The lattice, on the pivots and then on the others: the rows, which begin with unit vectors, and p on each other.
    basis = rows[:, [*pivots, *others]].tolist()
    basis += [[prime * (place == len(pivots) + other) for place in range(len(columns))] for other in range(len(others))]
    shortest = sorted(reduced(basis), key=lambda vector: sum(value * value for value in vector))
    found = torch.zeros(count, shares.shape[1], dtype=torch.int64)
    for vector, target in zip(shortest[:count], found, strict=True):
        for coefficient, row in zip(
            vector[: len(pivots)], rows, strict=True
        ):  # on the pivots a vector is its coefficients
            target.add_(row * coefficient).remainder_(prime)
    return found - prime * (found > prime // 2)
