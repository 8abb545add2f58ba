"""The coefficients: the identities of masking.md hold, and what breaks them is refused."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
import torch

from darknight.coding import PRIME_25, PRIME_28, Code, Mixing, Scheme, decoder, draw_code, real_table
from darknight.coding.algebra import all_minors_nonzero, inverse, multiply, parity_check, transpose
from darknight.coding.dense import field_dense, real_dense
from darknight.coding.systematic import (
    _verified_field,
    _verified_real,
    field_systematic,
    leakage_factor,
    real_systematic,
    worst_condition,
)
from darknight.errors import SchemeError
from darknight.randomness import Randomness

SIZES = [(1, 1, 0), (3, 1, 1), (4, 1, 0), (8, 1, 3), (2, 2, 0), (3, 2, 1), (4, 3, 0), (2, 3, 2)]


def gradient_identity(code: Code) -> list[list[float | int]]:
    """B^T A on the rows that make a weight gradient."""
    rows_a = [code.A.rows[j] for j in code.grad_rows]
    rows_b = [code.B.rows[j] for j in code.grad_rows]
    product = [
        [sum(b[i] * a[j] for a, b in zip(rows_a, rows_b, strict=True)) for j in range(len(rows_a[0]))]
        for i in range(len(rows_b[0]))
    ]
    return [[value % code.prime if code.prime else float(value) for value in row] for row in product]


def wanted_identity(code: Code) -> list[list[int]]:
    K = code.A.inputs
    return [[int(i == j and i < K) for j in range(K + code.A.colluders)] for i in range(K + code.B.colluders)]


@pytest.mark.parametrize(("inputs", "colluders", "spares"), SIZES)
@pytest.mark.parametrize("prime", [PRIME_25, PRIME_28])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_field_codes_satisfy_equation_5_with_invertible_noise(inputs, colluders, spares, prime, masked, dense):
    if dense:
        code = field_dense(Randomness(bytes(32)).fresh(), inputs, colluders, spares, prime, masked)
    else:
        code = field_systematic(inputs, colluders, spares, prime, masked)
    assert code.A.workers == inputs + (2 if masked else 1) * colluders + spares
    assert len(code.grad_rows) == code.A.workers - spares
    assert gradient_identity(code) == wanted_identity(code)
    for mixing in code.masking:
        assert all_minors_nonzero(mixing.noise, prime)


@pytest.mark.parametrize("inputs", range(1, 9))
def test_the_field_constants_for_one_colluder_are_the_published_ones(inputs):
    """x_j + r; sum x + (K+1) r; r   and   delta_j - s; s; -(sum delta + s); spares by their powers."""
    K = inputs
    code = field_systematic(K, 1, 2, PRIME_28, True)
    unit = [tuple(int(i == j) for j in range(K)) for i in range(K)]
    powers = [tuple(j**e for j in range(1, K + 1)) for e in (1, 2)]
    assert code.A.rows == (
        *((*row, 1) for row in unit),
        (*(1,) * K, K + 1),
        (*(0,) * K, 1),
        *((*row, (K + 1) ** e + sum(row)) for e, row in zip((1, 2), powers, strict=True)),
    )
    assert code.B.rows == (
        *((*row, -1) for row in unit),
        (*(0,) * K, 1),
        (*(-1,) * K, -1),
        *((*row, (K + 1) ** (e + 1) - sum(row)) for e, row in zip((1, 2), powers, strict=True)),
    )


@pytest.mark.parametrize("inputs", range(1, 9))
def test_the_real_constants_for_one_colluder_are_the_published_ones(inputs):
    K = inputs
    code = real_systematic(K, 1, 0, True)
    signs = [(-1) ** j for j in range(K)]
    assert [row[0] for row in code.A.noise] == [1] * K + [K, 1]
    assert [row[0] for row in code.B.noise] == [*signs, 1, -(K + K % 2)]
    assert code.A.data[K] == tuple(-sign for sign in signs)
    assert code.B.data[K + 1] == (-1,) * K


@pytest.mark.parametrize("spares", range(4))
@pytest.mark.parametrize("inputs", range(1, 9))
def test_any_enough_answers_decode_for_one_colluder(inputs, spares):
    """The closed-form argument in systematic._vandermonde, checked by trying every set of rows."""
    code = field_systematic(inputs, 1, spares, PRIME_25, True)
    for mixing in code.masking:
        check = parity_check([[int(value) for value in row] for row in mixing.rows], mixing.base, PRIME_25)
        assert all_minors_nonzero(check, PRIME_25)


def test_parity_check_decides_whether_row_sets_are_invertible():
    rows = [[1, 0, 1], [0, 1, 1], [1, 1, 3], [0, 0, 1], [2, 0, 2]]  # the last row is twice the first
    check = parity_check(rows, [0, 1, 3], PRIME_25)
    assert not any(any(row) for row in multiply(transpose(check), rows, PRIME_25))
    for chosen in combinations(range(5), 3):
        missing = [i for i in range(5) if i not in chosen]
        direct = inverse([rows[i] for i in chosen], PRIME_25) is not None
        assert direct == (inverse([check[i] for i in missing], PRIME_25) is not None)


@pytest.mark.parametrize(("inputs", "spares"), [(K, E) for K in (1, 2, 3, 4, 7, 8, 16) for E in (0, 1, 2)])
def test_real_rows_leak_at_most_one_unit_and_decode_stably(inputs, spares):
    code = real_systematic(inputs, 1, spares, True)
    assert gradient_identity(code) == wanted_identity(code)
    for mixing in code.masking:
        assert max(leakage_factor(mixing, (j,)) for j in range(mixing.workers)) <= 1 + 1e-12
        assert worst_condition(mixing) < 1e6


@pytest.mark.parametrize(("inputs", "colluders", "spares"), sorted(real_table._table()))
def test_every_table_entry_is_verified_again(inputs, colluders, spares):
    code = real_systematic(inputs, colluders, spares, True)
    assert gradient_identity(code) == wanted_identity(code)
    for mixing in code.masking:
        for size in range(1, colluders + 1):
            for coalition in combinations(range(mixing.workers), size):
                assert leakage_factor(mixing, coalition) <= 1 + 1e-9
        for coalition in combinations(mixing.noise, colluders):
            inverted = inverse(coalition, None)
            assert all((Fraction(value) * mixing.divisor).denominator == 1 for row in inverted for value in row)


@pytest.mark.parametrize("change", ["smaller noise", "parallel noise rows", "singular noise"])
def test_a_tampered_table_entry_does_not_construct(monkeypatch, change):
    entry = real_table.real_entry(2, 2, 0)
    if change == "smaller noise":
        entry = entry._replace(units=(entry.units[0] * 0.9, entry.units[1]))
    elif change == "parallel noise rows":
        entry = entry._replace(a=(entry.a[0], tuple(7 * v + (i == 0) for i, v in enumerate(entry.a[0]))))
    else:
        entry = entry._replace(a=(entry.a[0], entry.a[0]))
    monkeypatch.setattr("darknight.coding.systematic.real_entry", lambda *_: entry)
    with pytest.raises(SchemeError, match=r"coefficients|singular"):
        real_systematic.__wrapped__(2, 2, 0, True)


def test_d_zero_is_refused_because_delta_would_go_out_unmasked():
    """a, b = +-1 with C = sqrt(K) makes D exactly 0 in many draws; the verification catches it in both arithmetics."""
    code = field_systematic(3, 1, 0, PRIME_28, True)
    broken = replace(code, B=replace(code.B, noise=(*code.B.noise[:-1], (0,))))
    with pytest.raises(SchemeError, match="singular"):
        _verified_field(broken, proven=True)
    real = real_systematic(4, 1, 0, True)
    with pytest.raises(SchemeError, match="more than the stated bound"):
        _verified_real(replace(real, B=replace(real.B, noise=(*real.B.noise[:-1], (0,)))))


@pytest.mark.parametrize(
    ("inputs", "spares", "masked"), [(2, 1, False), (3, 0, False), (8, 3, False), (4, 0, True), (2, 2, True)]
)
def test_real_dense_codes_are_orthogonal_with_flat_noise(inputs, spares, masked):
    code = real_dense(Randomness(bytes(32)).fresh(), inputs, spares, masked)
    rows = [code.A, code.B] if masked else [code.A]
    base = len(code.grad_rows)
    for mixing in rows:
        assert {abs(value) for row in mixing.noise for value in row} == {1}
        full = torch.tensor(
            [(*data, noise[0] * mixing.unit) for data, noise in zip(mixing.data, mixing.noise, strict=True)]
        )
        columns = full[:base].double()
        torch.testing.assert_close(columns.T @ columns, torch.eye(inputs + 1, dtype=torch.float64))
        lengths = torch.tensor(mixing.data)[base:].norm(dim=1)
        torch.testing.assert_close(lengths, torch.full_like(lengths, (1 - 1 / base) ** 0.5))
    found, wanted = torch.tensor(gradient_identity(code)), torch.tensor(wanted_identity(code))
    torch.testing.assert_close(found, wanted.to(found.dtype), atol=1e-6, rtol=0)


def test_dense_codes_are_fresh_for_every_masking():
    generator = Randomness(bytes(32))
    scheme = Scheme(inputs=3, colluders=1, mixing="dense")
    first, second = (draw_code(scheme, generator.fresh()) for _ in range(2))
    assert first.A.rows != second.A.rows
    assert draw_code(replace(scheme, mixing="systematic"), generator.fresh()).A.rows[0] == (1, 0, 0, 1)


def test_a_decoder_needs_enough_answers_that_determine_the_inputs():
    code = field_systematic(3, 1, 1, PRIME_28, True)
    with pytest.raises(SchemeError, match="3 answers; decoding 3 inputs needs 4"):
        decoder(code.A, PRIME_28, [0, 1, 2])
    twice = Mixing(((1,), (1,), (0,)), ((1,), (1,), (1,)), (0, 2))
    with pytest.raises(SchemeError, match="do not determine"):
        decoder(twice, PRIME_28, [0, 1])


# --- over the rationals -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_rational_inverse_is_exact(size: int):
    """Floats with 53 bits, and matrices with many zeros, of which some are singular: their pivots lie anywhere."""
    generator = torch.Generator().manual_seed(size)
    singular = 0
    for sparse in (False, True):
        for _ in range(40):
            drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
            if sparse:
                drawn[torch.rand(size, size, generator=generator) < 0.5] = 0.0
            matrix = [[Fraction(value) for value in row] for row in drawn.tolist()]
            found = inverse(matrix, None)
            if found is None:
                singular += 1
                assert sparse
                assert torch.linalg.matrix_rank(drawn) < size
                continue
            for i, row in enumerate(matrix):
                products = [sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*found, strict=True)]
                assert products == [int(i == j) for j in range(size)]
    assert singular
