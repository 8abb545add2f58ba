"""The products in the field by workers that see only masked shares.

Guarantees: what any M workers receive is uniform and independent of x and delta; a result is returned only if it was
    verified, unless the scheme says integrity="off" (contract tests: tests/runtime/test_privacy.py,
    tests/runtime/test_integrity.py).
Assumes: fresh noise for every masking: each attempt is masked from scratch.
Leaks: shapes, which passes were asked for, and how often an attempt was repeated.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from darknight.accounting import Ledger, Masked, SentClear
from darknight.coding import Field, Mixing, Scheme, draw_code, field, group_count, joined, virtual_batches
from darknight.integrity import Given, parity, verified_forward, verified_grad_input, verified_grad_weight
from darknight.ops import BilinearOp
from darknight.randomness import Randomness, Stream
from darknight.runtime.checking import checking
from darknight.runtime.exchange import Exchange
from darknight.runtime.layer import Layer, Saved, SentWeights
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
        self, layer: Layer, op: BilinearOp, x: Tensor, weights: SentWeights, keep: bool, *, further: bool
    ) -> tuple[Tensor, Saved]:
        # 1. Mask, with fresh coefficients (dense code) and fresh noise.
        code, noise = draw_code(self._scheme, self._randomness.fresh()), self._randomness.fresh()
        shares = self._shares(layer, "input", code.A, x, noise)
        # 2. Send, and wait for the answers.
        saved = Saved(call=self._exchange.open_call(), x_shape=tuple(x.shape), weights=weights, code=code)
        saved.stream = noise.number
        if keep:
            self._exchange.forget_with(saved)
        with self._exchange.forward(layer, op, code, shares, saved, keep) as gathered:
            # 3. Unmask and check.
            case = Case(
                decode=partial(self._unmasked, layer, Pass.FORWARD, code.A, x.shape[0]),
                verify=lambda y, _, further: verified_forward(
                    op, y, x, weights.tensor, self._prime, self._randomness.fresh(), further=further
                ),
                given=lambda seat: Given(
                    op=op, kind=Pass.FORWARD, w=weights.tensor, x_shape=tuple(shares.shape[1:]), x=shares[seat]
                ),
                further=further,
            )
            return self._trial.settled(layer, gathered, case), saved

    def backward(
        self, layer: Layer, saved: Saved, x: Tensor, delta: Tensor, passes: tuple[Pass, ...], *, further: bool
    ) -> dict[Pass, Tensor]:
        code, op, w = saved.code, saved.weights.op, saved.weights.tensor
        assert code is not None
        # 1. Mask, with noise of its own.
        if code.masks_gradients:
            deltas = self._shares(layer, "gradient", code.B, delta, self._randomness.fresh())
        else:
            deltas = self._clear(layer, delta)

        def again(seat: int) -> Tensor:
            """A share of x that its worker has lost, from the same noise."""
            groups, noise = virtual_batches(x, self._scheme.inputs), self._randomness.replay(saved.stream)
            return field.encode(code.A, groups, self._prime, noise, rows=[seat])[0]

        def given(kind: Pass, seat: int) -> Given:
            return Given(
                op=op,
                kind=kind,
                w=w,
                x_shape=(group_count(saved.x_shape[0], self._scheme.inputs), *saved.x_shape[1:]),
                x=again(seat) if kind is Pass.GRAD_WEIGHT else None,
                delta=deltas[seat] if code.masks_gradients else self._exchange.clear_share(code, deltas, seat),
            )

        cases = {
            Pass.GRAD_INPUT: Case(
                decode=partial(self._unmasked, layer, Pass.GRAD_INPUT, code.B, delta.shape[0]),
                verify=lambda gx, _, further: verified_grad_input(
                    op, gx, delta, w, saved.x_shape, self._prime, self._randomness.fresh(), further=further
                ),
                given=partial(given, Pass.GRAD_INPUT),
                further=further,
            ),
            Pass.GRAD_WEIGHT: Case(
                decode=partial(field.decode_gradient, code),
                verify=lambda gw, _, further: verified_grad_weight(
                    op, gw, x, delta, tuple(w.shape), self._prime, self._randomness.fresh(), further=further
                ),
                given=partial(given, Pass.GRAD_WEIGHT),
                further=further,
            ),
        }
        # 2. Send, and wait for the answers.
        with self._exchange.backward(layer, saved, code, deltas, passes, again) as gathered:
            # 3. Unmask and check.
            return {kind: self._trial.settled(layer, gathered[kind], cases[kind]) for kind in passes}

    def _shares(self, layer: Layer, what: str, mixing: Mixing, batch: Tensor, noise: Stream) -> Tensor:
        """(worker, group, *feature). Every masking has a stream of noise of its own."""
        with phase("encode"):
            groups = virtual_batches(batch, self._scheme.inputs)
            shares = field.encode(mixing, groups, self._prime, noise)
        self._ledger.record(
            Masked(
                layer=layer.label,
                what=what,
                examples=batch.shape[0],
                groups=groups.shape[0],
                features=batch[0].numel(),
                nats=0.0,
            )
        )
        return shares

    def _clear(self, layer: Layer, delta: Tensor) -> Tensor:
        self._ledger.record(SentClear(layer=layer.label, examples=delta.shape[0]))
        groups = virtual_batches(delta, self._scheme.inputs)
        return groups.remainder(self._prime).to(torch.int32)

    def _unmasked(self, layer: Layer, kind: Pass, mixing: Mixing, examples: int, answers: dict[int, Tensor]) -> Tensor:
        if self._scheme.integrity in ("parity", "both"):
            with checking(self._ledger, layer, kind, "parity"):
                parity.verified_field_answers(mixing, answers, self._prime, kind)
        return joined(field.decode(mixing, answers, self._prime), examples)
