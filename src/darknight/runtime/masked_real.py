"""The products in real arithmetic by workers that see data drowned in Gaussian noise.

Guarantees: what any M workers receive tells them at most the nats that the ledger adds up; a result is returned only if
    it was verified, up to the rounding of honest workers, unless the scheme says integrity="off" (contract tests:
    tests/runtime/test_privacy.py, tests/runtime/test_integrity.py).
Assumes: inputs within their bound, which `runtime.bounds` sees to; fresh noise for every masking.
Leaks: the bound above, at every sending; with gradients in the clear, the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from darknight.accounting import Ledger, Masked, SentClear, worst_coalition
from darknight.coding import Mixing, Real, Scheme, draw_code, group_count, joined, real, virtual_batches
from darknight.errors import EncodingError
from darknight.integrity import parity
from darknight.integrity import real as checks
from darknight.ops import BilinearOp
from darknight.randomness import Randomness, Stream
from darknight.runtime.bounds import Bounds
from darknight.runtime.checking import checking, freivalds_checks, note_unchecked
from darknight.runtime.exchange import Exchange
from darknight.runtime.layer import Layer, Saved, SentWeights
from darknight.types import Pass


class MaskedReal:
    def __init__(
        self,
        scheme: Scheme,
        arithmetic: Real,
        exchange: Exchange,
        randomness: Randomness,
        bounds: Bounds,
        ledger: Ledger,
    ) -> None:
        self._scheme = scheme
        self._arithmetic = arithmetic
        self._exchange = exchange
        self._randomness = randomness
        self._bounds = bounds
        self._ledger = ledger

    def forward(
        self, layer: Layer, op: BilinearOp, x: Tensor, weights: SentWeights, keep: bool
    ) -> tuple[Tensor, Saved]:
        # 1. Mask, with fresh coefficients (dense code) and fresh noise.
        code = draw_code(self._scheme, self._randomness.fresh())
        grid = real.grid_for(code.A, self._arithmetic, self._bounds.of_input(layer, x))
        sent = checks.Sent.of_shares(code.A, grid, self._arithmetic.dtype)
        reach = checks.Reach.of(op, Pass.FORWARD, weights.tensor, tuple(x.shape))
        self._refuse_overflow(_largest(sent) * reach.total)
        noise = self._randomness.fresh()
        shares = self._shares(layer, "input", code.A, grid, x, noise)
        # 2. Send, and wait for the answers.
        values = checks.on_grid(x, grid)
        saved = Saved(call=self._exchange.open_call(), x_shape=tuple(x.shape), weights=weights, code=code)
        saved.stream = noise.number
        if keep:
            saved.values, saved.grid = values, grid
            self._exchange.forget_with(saved)
        answers = self._exchange.forward(layer, op, code, shares, saved, keep)
        # 3. Unmask and check.
        y = self._unmasked(layer, Pass.FORWARD, code.A, answers, x.shape[0], reach, sent)
        if freivalds_checks(self._scheme, Pass.FORWARD):
            spread = checks.decoded_spread(reach, sent, answers)
            with checking(self._ledger, layer, Pass.FORWARD, "freivalds"):
                checks.verified_forward(op, y, values, weights.tensor, self._randomness.fresh(), spread=spread)
        note_unchecked(self._scheme, self._ledger, layer, Pass.FORWARD)
        return y, saved

    def backward(self, layer: Layer, saved: Saved, delta: Tensor, passes: tuple[Pass, ...]) -> dict[Pass, Tensor]:
        code, op, w, dtype = saved.code, saved.weights.op, saved.weights.tensor, self._arithmetic.dtype
        assert code is not None
        assert saved.values is not None
        assert saved.grid is not None
        # 1. Mask, with noise of its own; or not, if the scheme sends gradients in the clear.
        if code.masks_gradients:
            grid = real.grid_for(code.B, self._arithmetic, self._bounds.of_gradient(layer, delta))
            deltas = self._shares(layer, "gradient", code.B, grid, delta, self._randomness.fresh())
            values = checks.on_grid(delta, grid)
            sent = checks.Sent.of_shares(code.B, grid, dtype)
        else:
            self._ledger.record(SentClear(layer=layer.label, examples=delta.shape[0]))
            values = delta.to(dtype)
            deltas = virtual_batches(values, self._scheme.inputs)
            sent = checks.Sent.in_the_clear(op, code.B, values, dtype)
        inputs = checks.Sent.of_shares(code.A, saved.grid, dtype)
        groups = group_count(delta.shape[0], self._scheme.inputs)
        shapes = (groups, *saved.x_shape[1:]), (groups, *delta.shape[1:])
        reach = checks.Reach.of(op, Pass.GRAD_INPUT, w, saved.x_shape)
        products = groups * op.positions(*shapes) * op.copies(shapes[0])
        self._refuse_overflow(_largest(sent) * max(reach.total, _largest(inputs) * products))

        def again(seat: int) -> Tensor:
            """A share of x that its worker has lost, from the same noise."""
            assert saved.values is not None
            assert saved.grid is not None
            batches, noise = virtual_batches(saved.values, self._scheme.inputs), self._randomness.replay(saved.stream)
            return real.encode(code.A, batches, saved.grid, noise, dtype, rows=[seat])[0]

        # 2. Send, and wait for the answers.
        answers = self._exchange.backward(layer, saved, code, deltas, passes, again)
        # 3. Unmask and check.
        results = {}
        if Pass.GRAD_INPUT in passes:
            found = answers[Pass.GRAD_INPUT]
            gx = self._unmasked(layer, Pass.GRAD_INPUT, code.B, found, delta.shape[0], reach, sent)
            if freivalds_checks(self._scheme, Pass.GRAD_INPUT):
                spread = checks.decoded_spread(reach, sent, found)
                with checking(self._ledger, layer, Pass.GRAD_INPUT, "freivalds"):
                    stream = self._randomness.fresh()
                    checks.verified_grad_input(op, gx, values, w, saved.x_shape, stream, spread=spread)
            results[Pass.GRAD_INPUT] = gx
        if Pass.GRAD_WEIGHT in passes:
            gw = real.decode_gradient(code, answers[Pass.GRAD_WEIGHT])
            if freivalds_checks(self._scheme, Pass.GRAD_WEIGHT):
                spread = checks.gradient_spread(op, code, inputs, sent, *shapes)
                with checking(self._ledger, layer, Pass.GRAD_WEIGHT, "freivalds"):
                    stream = self._randomness.fresh()
                    checks.verified_grad_weight(op, gw, saved.values, values, tuple(w.shape), stream, spread=spread)
            results[Pass.GRAD_WEIGHT] = gw
        note_unchecked(self._scheme, self._ledger, layer, *passes)
        return results

    def _shares(self, layer: Layer, what: str, mixing: Mixing, grid: real.Grid, batch: Tensor, noise: Stream) -> Tensor:
        """(worker, group, *feature). Every masking has a stream of noise of its own."""
        groups = virtual_batches(batch, self._scheme.inputs)
        shares = real.encode(mixing, groups, grid, noise, self._arithmetic.dtype)
        _, nats = worst_coalition(mixing, bound=1.0, noise_std=self._arithmetic.noise_std)
        features = batch[0].numel()
        self._ledger.record(Masked(layer=layer.label, what=what, examples=batch.shape[0], features=features, nats=nats))
        return shares

    def _refuse_overflow(self, largest: float) -> None:
        """What leaves the range of floats is nobody's lie."""
        if not largest <= torch.finfo(self._arithmetic.dtype).max:
            raise EncodingError(
                f"products of its values and noise leave {self._arithmetic.dtype}. Use float64 workers, or look for "
                "the layer that produced values so large."
            )

    def _unmasked(
        self,
        layer: Layer,
        kind: Pass,
        mixing: Mixing,
        answers: dict[int, Tensor],
        examples: int,
        reach: checks.Reach,
        sent: checks.Sent,
    ) -> Tensor:
        if self._scheme.integrity in ("parity", "both"):
            with checking(self._ledger, layer, kind, "parity"):
                parity.verified_real_answers(mixing, answers, kind, spread=checks.answer_spreads(reach, sent))
        return joined(real.decode(mixing, answers), examples)


def _largest(sent: checks.Sent) -> float:
    """What no element of a share exceeds."""
    sizes = [sent.share(worker) for worker in range(sent.mixing.workers)]
    return max(size.largest + real.TAIL * size.white for size in sizes)
