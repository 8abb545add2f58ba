"""The products in the field by workers that see only masked shares.

Guarantees: what any M workers receive is uniform and independent of x and delta; a result is returned only if it was
    verified, unless the scheme says integrity="off" (contract tests: tests/runtime/test_privacy.py,
    tests/runtime/test_integrity.py).
    Answers may be read where their workers can write: each is read once, by its decoding, and only what was decoded is
    verified and used (contract test: tests/runtime/test_changed_answers.py).
Assumes: fresh noise for every masking: each attempt is masked from scratch.
Leaks: shapes, which passes were asked for, and how often an attempt was repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor

from darknight.accounting import Ledger, Masked, SentClear
from darknight.coding import (
    Code,
    Field,
    Finish,
    MaskedShares,
    Mixing,
    Scheme,
    draw_code,
    field,
    group_count,
    virtual_batches,
)
from darknight.integrity import (
    Given,
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
from darknight.randomness import Randomness, Stream
from darknight.runtime.checking import checking
from darknight.runtime.exchange import Exchange
from darknight.runtime.layer import Layer, Saved, SentWeights
from darknight.runtime.operand import Operand, Product
from darknight.runtime.phases import phase
from darknight.runtime.trial import Case, Trial
from darknight.types import Pass


class MaskedField:
    def __init__(
        self, scheme: Scheme, arithmetic: Field, exchange: Exchange, randomness: Randomness, ledger: Ledger
    ) -> None:
        self._scheme = scheme
        self._prime = arithmetic.prime
        self._exchange = exchange
        self._randomness = randomness
        self._ledger = ledger
        self._trial = Trial(scheme, exchange, randomness, ledger)

    def forward(
        self,
        layer: Layer,
        op: BilinearOp,
        x: Operand,
        weights: SentWeights,
        keep: bool,
        *,
        further: bool,
        finish: Finish | None = None,
    ) -> tuple[Product, Saved]:
        # 1. Mask, with fresh coefficients (dense code) and fresh noise.
        code, noise = draw_code(self._scheme, self._randomness.fresh()), self._randomness.fresh()
        shares = self._shares(layer, "input", code.A, x, noise)
        # 2. Send, and wait for the answers.
        saved = Saved(call=self._exchange.open_call(), x_shape=x.shape, weights=weights, code=code)
        saved.stream = noise.number
        if keep:
            self._exchange.forget_with(saved)
        with self._exchange.forward(layer, op, code, shares, saved, keep) as gathered:
            # 3. Unmask and check.
            exponent, shape = x.exponent + weights.exponent, op.output_shape(x.shape, tuple(weights.tensor.shape))
            apart = partial(self._unmasked, layer, Pass.FORWARD, code.A, shape[0], exponent)
            case = Case(
                decode=partial(self._weighed, op, code.A, shape, exponent, finish, apart) if self._narrow(x) else apart,
                decode_further=apart,
                verify=lambda y, _, further: self._verify_forward(op, y, x, weights.tensor, further),
                given=lambda seat: Given(
                    op=op, kind=Pass.FORWARD, w=weights.tensor, x_shape=tuple(shares[seat].shape), x=shares[seat]
                ),
                further=further,
            )
            return self._trial.settled(layer, gathered, case), saved

    def backward(
        self, layer: Layer, saved: Saved, x: Operand, delta: Operand, passes: tuple[Pass, ...], *, further: bool
    ) -> dict[Pass, Product]:
        code, sent = saved.code, saved.weights
        op, w = sent.op, sent.tensor
        assert code is not None
        # 1. Mask, with noise of its own.
        deltas: MaskedShares | Tensor
        if code.masks_gradients:
            deltas = self._shares(layer, "gradient", code.B, delta, self._randomness.fresh())
        else:
            deltas = self._clear(layer, delta)

        def again(seat: int) -> Tensor:
            """A share of x that its worker has lost, from the same noise."""
            return x.share(code.A, self._prime, self._randomness.replay(saved.stream), seat)

        def given(kind: Pass, seat: int) -> Given:
            return Given(
                op=op,
                kind=kind,
                w=w,
                x_shape=(group_count(saved.x_shape[0], self._scheme.inputs), *saved.x_shape[1:]),
                x=again(seat) if kind is Pass.GRAD_WEIGHT else None,
                delta=deltas[seat] if code.masks_gradients else self._exchange.clear_share(code, deltas, seat),
            )

        exponent = delta.exponent + sent.exponent
        apart = partial(self._unmasked, layer, Pass.GRAD_INPUT, code.B, delta.shape[0], exponent)
        weighed = partial(self._weighed, op, code.B, saved.x_shape, exponent, None, apart)
        together = delta.exponent + x.exponent

        def summed(answers: dict[int, Tensor]) -> Product:
            return _product(*field.decode_gradient_values(code, answers, together), together)

        cases = {
            Pass.GRAD_INPUT: Case(
                decode=weighed if self._narrow(x, delta) else apart,
                decode_further=apart,
                verify=lambda gx, _, further: self._verify_grad_input(op, gx, delta, w, saved.x_shape, further),
                given=partial(given, Pass.GRAD_INPUT),
                further=further,
            ),
            Pass.GRAD_WEIGHT: Case(
                decode=partial(self._weighed_gradient, op, code, tuple(w.shape), together, summed)
                if self._narrow(x, delta)
                else summed,
                decode_further=summed,
                verify=lambda gw, _, further: self._verify_grad_weight(op, gw, x, delta, tuple(w.shape), further),
                given=partial(given, Pass.GRAD_WEIGHT),
                further=further,
            ),
        }
        # 2. Send, and wait for the answers.
        with self._exchange.backward(layer, saved, code, deltas, passes, again) as gathered:
            # 3. Unmask and check.
            return {kind: self._trial.settled(layer, gathered[kind], cases[kind]) for kind in passes}

    def _shares(self, layer: Layer, what: str, mixing: Mixing, batch: Operand, noise: Stream) -> MaskedShares:
        """By worker, (group, *feature). Every masking has a stream of noise of its own."""
        with phase("encode"):
            shares = batch.shares(mixing, self._prime, noise)
        self._ledger.record(
            Masked(
                layer=layer.label,
                what=what,
                examples=batch.shape[0],
                groups=group_count(batch.shape[0], self._scheme.inputs),
                features=prod(batch.shape[1:]),
                nats=0.0,
            )
        )
        return shares

    def _clear(self, layer: Layer, delta: Operand) -> Tensor:
        self._ledger.record(SentClear(layer=layer.label, examples=delta.shape[0]))
        groups = virtual_batches(delta.integers, self._scheme.inputs)
        return groups.remainder(self._prime).to(torch.int32)

    # --- unmask and check -------------------------------------------------------------------------------------------
    def _unmasked(
        self, layer: Layer, kind: Pass, mixing: Mixing, examples: int, exponent: int, answers: dict[int, Tensor]
    ) -> Product:
        if self._scheme.integrity in ("parity", "both"):
            with checking(self._ledger, layer, kind, "parity"):
                parity.verified_field_answers(mixing, answers, self._prime, kind)
        return _product(*field.decode_values(mixing, answers, self._prime, exponent, examples), exponent)

    def _narrow(self, *operands: Operand) -> bool:
        """Whether a result can be unmasked and weighed in one pass: nobody else asks for the integers."""
        floats = all(operand.values.dtype == torch.float32 for operand in operands)
        return floats and self._scheme.integrity == "freivalds"

    def _weighed(
        self,
        op: BilinearOp,
        mixing: Mixing,
        shape: tuple[int, ...],
        exponent: int,
        finish: Finish | None,
        apart: Callable[[dict[int, Tensor]], Product],
        answers: dict[int, Tensor],
    ) -> Product:
        """The result, and its sums for the check, whose vectors are drawn now: the answers are there."""
        vectors, weighing = weighing_for(op, shape, self._prime, self._randomness.fresh())
        found = field.decode_weighed(mixing, answers, self._prime, exponent, shape[0], weighing, finish)
        if found is None:
            return apart(answers)
        floats, sums = found
        return Product(None, exponent, floats, weighed_as(op, shape, vectors, sums), finished=finish is not None)

    def _weighed_gradient(
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

    def _verify_forward(self, op: BilinearOp, y: Product, x: Operand, w: Tensor, further: bool) -> None:
        if y.weighed is not None:
            agree_forward(op, y.weighed, x.numbers, w, self._prime)
            return
        assert y.integers is not None
        stream = self._randomness.fresh()
        verified_forward(op, y.integers, x.numbers, w, self._prime, stream, further=further)

    def _verify_grad_input(
        self, op: BilinearOp, gx: Product, delta: Operand, w: Tensor, shape: tuple[int, ...], further: bool
    ) -> None:
        if gx.weighed is not None:
            agree_grad_input(op, gx.weighed, delta.integers, w, self._prime)
            return
        assert gx.integers is not None
        stream = self._randomness.fresh()
        verified_grad_input(op, gx.integers, delta.integers, w, shape, self._prime, stream, further=further)

    def _verify_grad_weight(
        self, op: BilinearOp, gw: Product, x: Operand, delta: Operand, shape: tuple[int, ...], further: bool
    ) -> None:
        if gw.weighed is not None:
            agree_grad_weight(op, gw.weighed, x.numbers, delta.integers, self._prime)
            return
        assert gw.integers is not None
        stream = self._randomness.fresh()
        verified_grad_weight(op, gw.integers, x.numbers, delta.integers, shape, self._prime, stream, further=further)


def _product(integers: Tensor, floats: Tensor, exponent: int) -> Product:
    return Product(integers, exponent, floats)
