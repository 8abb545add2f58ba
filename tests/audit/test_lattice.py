"""Lattice reduction: the basis stays a basis, is reduced, and finds what is small among combinations modulo a prime."""

from fractions import Fraction

import pytest
import torch

from darknight.audit.lattice import echelon, reduced, short_combinations
from darknight.coding import PRIME_28


def random_basis(size, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << bits), 1 << bits, (size, size), generator=generator).tolist()


def gram_schmidt(basis):
    """Exact, for the definition of a reduced basis."""
    rows, coefficients = [], []
    for vector in basis:
        rest, mine = [Fraction(value) for value in vector], []
        for row in rows:
            mu = sum(a * b for a, b in zip(vector, row, strict=True)) / sum(b * b for b in row)
            mine.append(mu)
            rest = [a - mu * b for a, b in zip(rest, row, strict=True)]
        rows.append(rest)
        coefficients.append(mine)
    return rows, coefficients


def determinant(rows):
    total = Fraction(1)
    for row in gram_schmidt(rows)[0]:
        total *= sum(value * value for value in row)
    return total


@pytest.mark.parametrize(("size", "bits", "seed"), [(2, 30, 0), (5, 12, 1), (9, 20, 2)])
def test_the_result_is_a_reduced_basis_of_the_same_lattice(size, bits, seed):
    basis = random_basis(size, bits, seed)
    short = reduced(basis)
    rows, coefficients = gram_schmidt(short)
    assert all(abs(mu) <= Fraction(1, 2) for mine in coefficients for mu in mine)
    for i in range(1, size):
        before, here = (sum(value * value for value in row) for row in rows[i - 1 : i + 1])
        assert here >= (Fraction(99, 100) - coefficients[i][i - 1] ** 2) * before
    change = torch.linalg.solve(
        torch.tensor(basis, dtype=torch.float64).T, torch.tensor(short, dtype=torch.float64).T
    )  # whole numbers, of determinant 1 or -1
    assert torch.allclose(change, change.round(), atol=1e-3)
    assert determinant(short) == determinant(basis)


def test_a_planted_short_vector_is_found():
    """Multiples of an unknown factor modulo a prime: only one multiple of them is small."""
    small = [3, -7, 1, 12, -5, 9, 2, -4]
    share = torch.tensor([[value * 123_456_789 % PRIME_28 for value in small]])
    found = short_combinations(share, PRIME_28, count=1, columns=range(8))
    assert found.tolist() in ([small], [[-value for value in small]])


def test_echelon_gives_unit_vectors_and_drops_what_depends():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(PRIME_28, (3, 7), generator=generator)
    rows = torch.cat([rows, (2 * rows[:1] + rows[1:2]) % PRIME_28])
    units, pivots = echelon(rows, PRIME_28, [6, 1, 4, 0])
    assert pivots == [6, 1, 4]
    assert torch.equal(units[:, pivots], torch.eye(3, dtype=torch.int64))
    again, _ = echelon(torch.cat([units, rows]), PRIME_28, [6, 1, 4, 0])  # nothing new in the rows
    assert torch.equal(again, units)


def test_dependent_rows_are_refused():
    with pytest.raises(ValueError, match="dependent"):
        reduced([[1, 2, 3], [2, 4, 6]])
