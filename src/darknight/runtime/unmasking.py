"""Answers in the field become results: unmasked, and checked against what they should be.

Guarantees: answers may be read where their workers can write: each is read once, by its decoding, and only what was
    decoded is verified and used (contract test: tests/runtime/test_changed_answers.py). The vectors of a check are
    drawn when the answers are there (contract test: tests/runtime/test_check_vectors.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from darknight.accounting import Ledger
from darknight.coding import Code, Finish, Mixing, Scheme, field, group_count
from darknight.integrity import (
    agree_forward,
    agree_grad_input,
    agree_grad_weight,
    gradient_weighed_as,
    parity,
    verified_forward,
    verified_grad_input,
    verified_grad_weight,
    weighed_as,
    weighing_for,
    weighing_for_gradient,
)
from darknight.ops import BilinearOp
from darknight.randomness import Randomness
from darknight.runtime.checking import checking
from darknight.runtime.chunks import Into
from darknight.runtime.layer import Layer
from darknight.runtime.operand import Operand, Product
from darknight.types import Pass


class Unmasking:
    """Decoding, by itself or together with the sums of its check, and the checks of the three passes."""

    def __init__(self, scheme: Scheme, prime: int, randomness: Randomness, ledger: Ledger) -> None:
        self._scheme = scheme
        self._prime = prime
        self._randomness = randomness
        self._ledger = ledger

    def unmasked(
        self,
        layer: Layer,
        kind: Pass,
        mixing: Mixing,
        examples: int,
        exponent: int,
        into: Into | None,
        answers: dict[int, Tensor],
    ) -> Product:
        if self._scheme.integrity in ("parity", "both"):
            with checking(self._ledger, layer, kind, "parity"):
                parity.verified_field_answers(mixing, answers, self._prime, kind)
        padded = group_count(examples, mixing.inputs) * mixing.inputs
        places = None if into is None else (into(torch.int32, padded), into(torch.float32, padded))
        return Product.of(*field.decode_values(mixing, answers, self._prime, exponent, examples, places), exponent)

    def narrow(self, *operands: Operand) -> bool:
        """Whether a result can be unmasked and weighed in one pass: nobody else asks for the integers."""
        floats = all(operand.values.dtype == torch.float32 for operand in operands)
        return floats and self._scheme.integrity == "freivalds"

    def weighed(
        self,
        op: BilinearOp,
        mixing: Mixing,
        shape: tuple[int, ...],
        exponent: int,
        finish: Finish | None,
        into: Into | None,
        apart: Callable[[dict[int, Tensor]], Product],
        answers: dict[int, Tensor],
    ) -> Product:
        """The result, and its sums for the check, whose vectors are drawn now: the answers are there."""
        vectors, weighing = weighing_for(op, shape, self._prime, self._randomness.fresh())
        place = None if into is None else into(torch.float32, shape[0])
        found = field.decode_weighed(mixing, answers, self._prime, exponent, shape[0], weighing, finish, place)
        if found is None:
            return apart(answers)
        floats, sums = found
        return Product(None, exponent, floats, weighed_as(op, shape, vectors, sums), finished=finish is not None)

    def weighed_gradient(
        self,
        op: BilinearOp,
        code: Code,
        shape: tuple[int, ...],
        exponent: int,
        apart: Callable[[dict[int, Tensor]], Product],
        answers: dict[int, Tensor],
    ) -> Product:
        drawn = weighing_for_gradient(op, shape, self._prime, self._randomness.fresh())
        if drawn is None:
            return apart(answers)
        vectors, weighing = drawn
        found = field.decode_gradient_weighed(code, answers, exponent, weighing)
        if found is None:
            return apart(answers)
        floats, sums = found
        return Product(None, exponent, floats, gradient_weighed_as(shape, vectors, sums))

    def verify_forward(self, op: BilinearOp, y: Product, x: Operand, w: Tensor, further: bool) -> None:
        if y.weighed is not None:
            agree_forward(op, y.weighed, x.numbers, w, self._prime)
            return
        stream = self._randomness.fresh()
        verified_forward(op, y.whole, x.numbers, w, self._prime, stream, further=further)

    def verify_grad_input(
        self, op: BilinearOp, gx: Product, delta: Operand, w: Tensor, shape: tuple[int, ...], further: bool
    ) -> None:
        if gx.weighed is not None:
            agree_grad_input(op, gx.weighed, delta.integers, w, self._prime)
            return
        stream = self._randomness.fresh()
        verified_grad_input(op, gx.whole, delta.integers, w, shape, self._prime, stream, further=further)

    def verify_grad_weight(
        self, op: BilinearOp, gw: Product, x: Operand, delta: Operand, shape: tuple[int, ...], further: bool
    ) -> None:
        if gw.weighed is not None:
            agree_grad_weight(op, gw.weighed, x.numbers, delta.integers, self._prime)
            return
        stream = self._randomness.fresh()
        verified_grad_weight(op, gw.whole, x.numbers, delta.integers, shape, self._prime, stream, further=further)
