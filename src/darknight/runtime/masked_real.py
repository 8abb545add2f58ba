"""The products in real arithmetic by workers that see data drowned in Gaussian noise.

Guarantees: what any M workers receive tells them at most the nats that the ledger adds up, and the ledger's budget is
    asked before anything of a layer call is sent; a result is returned only if it was verified, up to the rounding of
    honest workers, unless the scheme says integrity="off" (contract tests: tests/runtime/test_composition.py,
    tests/runtime/test_budget.py, tests/runtime/test_integrity.py).
Assumes: inputs within their bound, which `runtime.bounds` sees to; fresh noise for every masking.
Leaks: the bound above, at every sending; with gradients in the clear, the gradients.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from darknight.accounting import Ledger, Masked, SentClear, coalition_bounds, papers_bound
from darknight.coding import Mixing, Real, Scheme, draw_code, group_count, real, virtual_batches
from darknight.errors import EncodingError
from darknight.integrity import Given, parity
from darknight.integrity import real as checks
from darknight.ops import BilinearOp
from darknight.randomness import Randomness, Stream
from darknight.runtime.autograd import in_backward
from darknight.runtime.bounds import Bounds
from darknight.runtime.checking import checking, freivalds_checks
from darknight.runtime.exchange import Exchange
from darknight.runtime.layer import Layer, Saved, SentWeights
from darknight.runtime.phases import phase
from darknight.runtime.trial import Case, Trial
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
        self._budget = ledger.budget
        self._constants: dict[str, tuple[dict[tuple[int, ...], float], float]] = {}
        self._trial = Trial(scheme, exchange, randomness, ledger)

    def forward(
        self, layer: Layer, op: BilinearOp, x: Tensor, weights: SentWeights, keep: bool
    ) -> tuple[Tensor, Saved]:
        # 1. Mask, with fresh coefficients (dense code) and fresh noise.
        code = draw_code(self._scheme, self._randomness.fresh())
        masked, later = self._masked(layer, "input", code.A, tuple(x.shape)), 0.0
        if keep and code.masks_gradients:
            shape = op.output_shape(tuple(x.shape), tuple(weights.tensor.shape))
            later = self._masked(layer, "gradient", code.B, shape).nats_per_example
        recomputed = in_backward()
        self._budget.forward(layer.label, masked.nats_per_example, later=later, keep=keep, recomputed=recomputed)
        grid = real.grid_for(code.A, self._arithmetic, self._bounds.of_input(layer, x))
        sent = checks.Sent.of_shares(code.A, grid, self._arithmetic.dtype)
        reach = checks.Reach.of(op, Pass.FORWARD, weights.tensor, tuple(x.shape))
        self._refuse_overflow(_largest(sent) * reach.total)
        noise = self._randomness.fresh()
        shares, values = self._shares(masked, code.A, grid, x, noise)
        # 2. Send, and wait for the answers.
        saved = Saved(call=self._exchange.open_call(), x_shape=tuple(x.shape), weights=weights, code=code)
        saved.stream = noise.number
        if keep:
            saved.values, saved.grid = values, grid
            self._exchange.forget_with(saved)
            if not recomputed:
                self._budget.promise(saved, later)
        with self._exchange.forward(layer, op, code, shares, saved, keep) as gathered:
            # 3. Unmask and check.
            case = Case(
                decode=partial(self._unmasked, layer, Pass.FORWARD, x, reach, sent),
                verify=lambda y, answers, _: checks.verified_forward(
                    op,
                    y,
                    values,
                    weights.tensor,
                    self._randomness.fresh(),
                    spread=checks.decoded_spread(reach, sent, answers),
                ),
                given=lambda seat: Given(
                    op=op, kind=Pass.FORWARD, w=weights.tensor, x_shape=tuple(shares.shape[1:]), x=shares[seat]
                ),
                spreads=lambda: checks.answer_spreads(reach, sent),
            )
            return self._trial.settled(layer, gathered, case), saved

    def backward(self, layer: Layer, saved: Saved, delta: Tensor, passes: tuple[Pass, ...]) -> dict[Pass, Tensor]:
        code, op, w, dtype = saved.code, saved.weights.op, saved.weights.tensor, self._arithmetic.dtype
        assert code is not None
        assert saved.grid is not None
        # 1. Mask, with noise of its own; or not, if the scheme sends gradients in the clear.
        if code.masks_gradients:
            masked = self._masked(layer, "gradient", code.B, tuple(delta.shape))
            self._budget.backward(layer.label, masked.nats_per_example, saved)
            grid = real.grid_for(code.B, self._arithmetic, self._bounds.of_gradient(layer, delta))
            deltas, values = self._shares(masked, code.B, grid, delta, self._randomness.fresh())
            sent = checks.Sent.of_shares(code.B, grid, dtype)
        else:
            self._budget.backward(layer.label, 0.0, saved)
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
            assert saved.grid is not None
            noise = self._randomness.replay(saved.stream)
            return real.encode_batch(code.A, _kept(saved), saved.grid, noise, dtype, rows=[seat])[0][0]

        def given(kind: Pass, seat: int) -> Given:
            return Given(
                op=op,
                kind=kind,
                w=w,
                x_shape=shapes[0],
                x=again(seat) if kind is Pass.GRAD_WEIGHT else None,
                delta=deltas[seat] if code.masks_gradients else self._exchange.clear_share(code, deltas, seat),
            )

        cases = {
            Pass.GRAD_INPUT: Case(
                decode=partial(self._unmasked, layer, Pass.GRAD_INPUT, delta, reach, sent),
                verify=lambda gx, answers, _: checks.verified_grad_input(
                    op,
                    gx,
                    values,
                    w,
                    saved.x_shape,
                    self._randomness.fresh(),
                    spread=checks.decoded_spread(reach, sent, answers),
                ),
                given=partial(given, Pass.GRAD_INPUT),
                spreads=lambda: checks.answer_spreads(reach, sent),
            ),
            Pass.GRAD_WEIGHT: Case(
                decode=partial(real.decode_gradient, code),
                verify=lambda gw, *_: checks.verified_grad_weight(
                    op,
                    gw,
                    _kept(saved),
                    values,
                    tuple(w.shape),
                    self._randomness.fresh(),
                    spread=checks.gradient_spread(op, code, inputs, sent, *shapes),
                ),
                given=partial(given, Pass.GRAD_WEIGHT),
                spreads=lambda: checks.equation_spreads(op, code, inputs, sent, *shapes),
            ),
        }
        # 2. Send, and wait for the answers.
        with self._exchange.backward(layer, saved, code, deltas, passes, again) as gathered:
            # 3. Unmask and check.
            return {kind: self._trial.settled(layer, gathered[kind], cases[kind]) for kind in passes}

    def _masked(self, layer: Layer, what: str, mixing: Mixing, shape: tuple[int, ...]) -> Masked:
        """What masking a batch of this shape may show."""
        if self._scheme.mixing == "dense":
            bounds, paper = self._stated(mixing)
        else:  # public constants: the same for every masking
            bounds, paper = self._constants[what] = self._constants.get(what) or self._stated(mixing)
        return Masked(
            layer=layer.label,
            what=what,
            examples=shape[0],
            groups=group_count(shape[0], self._scheme.inputs),
            features=math.prod(shape[1:]),
            nats=max(bounds.values()),
            by_coalition=bounds,
            paper=paper,
        )

    def _stated(self, mixing: Mixing) -> tuple[dict[tuple[int, ...], float], float]:
        """Nats a feature by coalition, and by the paper's theorem; noise is measured in times the bound."""
        std = self._arithmetic.noise_std
        return coalition_bounds(mixing, bound=1.0, noise_std=std), papers_bound(mixing, bound=1.0, noise_std=std)

    def _shares(
        self, masked: Masked, mixing: Mixing, grid: real.Grid, batch: Tensor, noise: Stream
    ) -> tuple[Tensor, Tensor]:
        """(worker, group, *feature), and the batch on its grid. Every masking has a stream of noise of its own."""
        with phase("encode"):
            shares, values = real.encode_batch(mixing, batch, grid, noise, self._arithmetic.dtype)
        self._ledger.record(masked)
        return shares, values

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
        batch: Tensor,
        reach: checks.Reach,
        sent: checks.Sent,
        answers: dict[int, Tensor],
    ) -> Tensor:
        """The result for `batch`, which was masked."""
        if self._scheme.integrity in ("parity", "both"):
            with checking(self._ledger, layer, kind, "parity"):
                parity.verified_real_answers(sent.mixing, answers, kind, spread=checks.answer_spreads(reach, sent))
        # Freivalds' check wants what float32 would round.
        narrow = batch.dtype == torch.float32 and not freivalds_checks(self._scheme, kind)
        dtype = torch.float32 if narrow else torch.float64
        return real.decode_batch(sent.mixing, answers, len(batch), dtype)


def _kept(saved: Saved) -> Tensor:
    """The input as it was encoded."""
    assert saved.values is not None
    return saved.values


def _largest(sent: checks.Sent) -> float:
    """What no element of a share exceeds."""
    sizes = [sent.share(worker) for worker in range(sent.mixing.workers)]
    return max(size.largest + real.TAIL * size.white for size in sizes)
