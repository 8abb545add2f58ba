"""The paper's redundancy check: the answers must be a codeword. For forward and grad input.

Answers are linear in the shares, so whatever annihilates the rows of the code annihilates the answers: for every parity
column h with h^T A = 0, sum_j h_j ybar_j = 0. Each answer beyond the K+M that decoding needs gives one such column. A
weight gradient is a sum of products and has none: it is checked by Freivalds.

Guarantees: in the field, with fresh secret coefficients (the dense code), a wrong answer of at most M colluding liars
    passes with probability at most 1/p for each parity column. In the reals, and with public coefficients, parity finds
    faults, not attackers: who knows the coefficients can lie along the code. Contract test:
    tests/integrity/test_parity.py.
Assumes: at least one worker is right. Parity is blind when all are wrong together, such as with the same stale weights,
    and to exchanged answers of two workers whose coefficients are equal in every parity column.
Leaks: to the worker, that a check failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from math import isfinite, prod, sqrt

from torch import Tensor

from darknight.coding import Mixing
from darknight.coding.algebra import Matrix, Number, inverse
from darknight.coding.code import same_shape
from darknight.coding.field import syndromes
from darknight.errors import EncodingError, IntegrityError, SchemeError
from darknight.integrity.real import deviations
from darknight.kernels.real import within
from darknight.types import Pass


def verified_field_answers(
    mixing: Mixing, replies: Mapping[int, Tensor], prime: int, kind: Pass
) -> Mapping[int, Tensor]:
    """The answers (group, *feature) by worker, if they are residues and a codeword of `mixing` modulo prime."""
    workers, checks = _parity_checks(mixing, replies, prime, kind)
    answers = [replies[worker] for worker in workers]
    if same_shape(answers).numel() == 0:
        return replies
    if not all(_are_residues(answer, prime) for answer in answers):
        _refuse(kind, "an answer is not made of residues")
    if bool(syndromes([[int(value) for value in row] for row in checks], answers, prime).any()):
        _refuse(kind, "the answers contradict each other")
    return replies


def verified_real_answers(
    mixing: Mixing, replies: Mapping[int, Tensor], kind: Pass, *, spread: Mapping[int, float]
) -> Mapping[int, Tensor]:
    """The answers by worker, if they are a codeword of `mixing` up to rounding.

    spread: the standard deviation of the rounding error of an honest worker's answer, per element, by worker
    (integrity.real.answer_spreads). It must not be taken from the answers: a lie could widen it.
    """
    workers, checks = _parity_checks(mixing, replies, None, kind)
    answers = [replies[worker] for worker in workers]
    elements = prod(same_shape(answers).shape)
    width = deviations(len(checks) * elements)
    for row in checks:
        weights = [float(value) for value in row]
        tolerance = width * sqrt(
            sum((weight * spread[worker]) ** 2 for weight, worker in zip(weights, workers, strict=True))
        )
        if not isfinite(tolerance):
            raise EncodingError("a spread that is not finite bounds nothing. Look for weights that are not finite.")
        if not within(weights, answers, tolerance):  # nor is what is not a number, whatever its weight
            _refuse(kind, "the answers contradict each other by more than rounding explains")
    return replies


def _parity_checks(
    mixing: Mixing, replies: Mapping[int, Tensor], prime: int | None, kind: Pass
) -> tuple[tuple[int, ...], Matrix]:
    """The workers that answered, and rows (parity column, worker) that annihilate their rows of the code, exactly."""
    if kind is Pass.GRAD_WEIGHT:
        raise SchemeError("answers to a weight gradient are products and form no code. Check the sum by Freivalds.")
    workers = tuple(sorted(replies))
    needed = mixing.inputs + mixing.colluders
    if len(workers) <= needed:
        raise SchemeError(
            f"{len(workers)} answers, of which decoding needs {needed}: nothing is left to compare. "
            'Use spares=1 or more, or integrity="freivalds".'
        )
    rows = [[_exact(value, prime) for value in mixing.rows[worker]] for worker in workers]
    for base in combinations(range(len(rows)), needed):
        solved = _inverse([rows[place] for place in base], prime)
        if solved is not None:
            others = [place for place in range(len(rows)) if place not in base]
            return workers, tuple(_check(rows[place], solved, base, place, len(rows), prime) for place in others)
    raise SchemeError(f"the answers of workers {workers} do not determine the inputs.")


def _check(
    row: Sequence[Number], solved: Matrix, base: Sequence[int], place: int, count: int, prime: int | None
) -> tuple[Number, ...]:
    """answer[place] - sum over base of its coefficients there * answer[base], which is zero."""
    check: list[Number] = [0] * count
    check[place] = 1
    for at, column in zip(base, zip(*solved, strict=True), strict=True):
        value = -sum((left * right for left, right in zip(row, column, strict=True)), start=Fraction(0))
        check[at] = int(value) % prime if prime else value
    return tuple(check)


def _inverse(rows: list[list[Number]], prime: int | None) -> Matrix | None:
    return inverse([[int(value) for value in row] for row in rows], prime) if prime else inverse(rows, None)


def _are_residues(answer: Tensor, prime: int) -> bool:
    lowest, highest = answer.aminmax()
    return not answer.is_floating_point() and int(lowest) >= 0 and int(highest) < prime


def _exact(value: Number | float, prime: int | None) -> Number:
    """Floats are fractions too; taken exactly, the parity columns annihilate the code to the last bit."""
    return int(value) if prime else Fraction(value)


def _refuse(kind: Pass, found: str) -> None:
    raise IntegrityError(f"{kind.value}: {found}.", kind=kind.value, check="parity")
