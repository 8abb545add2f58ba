"""The coefficients of one masking.

Axis order everywhere: worker, source, feature. The paper flips it between its equations, and A is square there, so a
transposed A passes every shape check and is silently wrong; our A is never square in a test.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from darknight.coding.algebra import Number, inverse
from darknight.errors import EncodingError, SchemeError
from darknight.types import Secret

Decoder = tuple[tuple[int, ...], tuple[tuple[Number | float, ...], ...]]  # rows that decode, and L


@dataclass(frozen=True, repr=False, eq=False)
class Mixing(Secret):
    """One matrix of the code, (worker, source): a data block (worker, input) and a noise block (worker, noise row).

    base: rows that decode by default. unit, divisor: Real only, see coding.real. What was once solved is kept as
    long as the matrix itself.
    """

    data: tuple[tuple[Number | float, ...], ...]
    noise: tuple[tuple[int, ...], ...]
    base: tuple[int, ...]
    unit: float = 1.0
    divisor: int = 1
    _solved: dict[tuple[int | None, tuple[int, ...]], Decoder] = field(default_factory=dict, init=False)

    @cached_property
    def rows(self) -> tuple[tuple[Number | float, ...], ...]:
        return tuple((*data, *noise) for data, noise in zip(self.data, self.noise, strict=True))

    @cached_property
    def integers(self) -> tuple[tuple[int, ...], ...]:
        """rows, over F_prime."""
        return tuple(tuple(int(value) for value in row) for row in self.rows)

    @cached_property
    def carriers(self) -> dict[int, int]:
        """The workers whose share is a noise row and nothing else, and which row that is."""
        return {
            worker: noise.index(1)
            for worker, (data, noise) in enumerate(zip(self.data, self.noise, strict=True))
            if not any(data) and sum(map(abs, noise)) == 1 and 1 in noise
        }

    @cached_property
    def workers(self) -> int:
        return len(self.data)

    @cached_property
    def inputs(self) -> int:
        return len(self.data[0])

    @cached_property
    def colluders(self) -> int:
        return len(self.noise[0])


@dataclass(frozen=True, repr=False, eq=False)
class Code(Secret):
    """A for inputs, B for gradients; over F_prime, or over the reals when prime is None.

    grad_rows are the workers whose answers make the weight gradient: B^T A = diag(I_K, 0) on them (Eq. 5). With
    gradients in the clear B has no noise block, and B^T A = [I_K 0].
    """

    prime: int | None
    A: Mixing
    B: Mixing
    grad_rows: tuple[int, ...]

    @cached_property
    def masks_gradients(self) -> bool:
        return self.B.colluders > 0

    @property
    def masking(self) -> tuple[Mixing, ...]:
        """The matrices that carry noise."""
        return (self.A, self.B) if self.masks_gradients else (self.A,)

    @property
    def amplification(self) -> float:
        """sqrt(sum_j |A2_j|^2 |B2_j|^2): how the product of two noises grows in a weight gradient (Real)."""
        return (
            self.A.unit
            * self.B.unit
            * sqrt(sum(_square(self.A.noise[j]) * _square(self.B.noise[j]) for j in self.grad_rows))
        )


def decoder(mixing: Mixing, prime: int | None, available: Collection[int] | None) -> Decoder:
    """Rows and a matrix L (input, row) with L @ mixing[rows] = [I_K 0]: y = L ybar (Eq. 3).

    `available` are the workers that answered, None for all. Raises SchemeError when they are too few.
    """
    wanted = mixing.inputs + mixing.colluders
    present = set(range(mixing.workers)) if available is None else set(available)
    rows = mixing.base if present.issuperset(mixing.base) else tuple(sorted(present))
    if len(rows) < wanted:
        raise SchemeError(f"{len(rows)} answers; decoding {mixing.inputs} inputs needs {wanted}.")
    known = mixing._solved.get((prime, rows))
    if known is None:
        known = mixing._solved[prime, rows] = _solved(mixing, prime, rows, wanted)
    return known


def _solved(mixing: Mixing, prime: int | None, rows: tuple[int, ...], wanted: int) -> Decoder:
    chosen = [mixing.rows[row] for row in rows]
    solved: Sequence[Sequence[Number | float]] | None
    if any(isinstance(value, float) for row in chosen for value in row):
        solved = torch.linalg.pinv(torch.tensor(chosen, dtype=torch.float64)).tolist()
    elif prime is None:
        rows = rows[:wanted]
        solved = inverse([[Fraction(value) for value in row] for row in chosen[:wanted]], None)
    else:
        rows = rows[:wanted]
        solved = inverse([[int(value) for value in row] for row in chosen[:wanted]], prime)
    if solved is None:
        raise SchemeError(f"the answers of workers {rows} do not determine the inputs.")
    return rows, tuple(tuple(row) for row in solved[: mixing.inputs])


def same_shape(answers: Sequence[Tensor]) -> Tensor:
    """The first answer, if all have its shape; a smaller one would be broadcast and decode to something."""
    first = answers[0].shape
    for answer in answers:
        if answer.shape != first:
            raise EncodingError(
                f"answers of shapes {sorted({tuple(each.shape) for each in answers})}; needs one shape."
            )
    return answers[0]


def _square(row: Sequence[int]) -> int:
    return sum(value * value for value in row)
