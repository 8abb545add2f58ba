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
from darknight.coding import Code, Mixing, Real, Scheme, draw_code, group_count, real, virtual_batches
from darknight.errors import EncodingError
from darknight.integrity import Given, parity
from darknight.integrity import real as checks
from darknight.ops import BilinearOp
from darknight.randomness import Randomness, Stream
from darknight.runtime.autograd import in_backward
from darknight.runtime.bounds import Bounds
from darknight.runtime.checking import checking, freivalds_checks
from darknight.runtime.chunks import Into, Room, Steps, chunks, overlapped
from darknight.runtime.exchange import Exchange
from darknight.runtime.layer import Layer, Saved, SentWeights
from darknight.runtime.masking import Maker
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
        # Coefficients (dense code), bound and grid are of the whole batch; noise, answers and checks of each chunk.
        code, shape = draw_code(self._scheme, self._randomness.fresh()), op.output_shape(tuple(x.shape), weights.shape)
        masked, later = self._masked(layer, "input", code.A, tuple(x.shape)), 0.0
        if keep and code.masks_gradients:
            later = self._masked(layer, "gradient", code.B, shape).nats_per_example
        recomputed = in_backward()
        self._budget.forward(layer.label, masked.nats_per_example, later=later, keep=keep, recomputed=recomputed)
        grid = real.grid_for(code.A, self._arithmetic, self._bounds.of_input(layer, x))
        sent = checks.Sent.of_shares(code.A, grid, self._arithmetic.dtype)
        reach = checks.Reach.of(op, Pass.FORWARD, weights.tensor, tuple(x.shape))
        self._refuse_overflow(_largest(sent) * reach.total)
        cuts = chunks(self._scheme, tuple(x.shape), shape, weights.shape, self._arithmetic.dtype.itemsize)
        saved = Saved.of(tuple(x.shape), weights, code, cuts, self._exchange.open_call)
        if keep and not recomputed:
            self._budget.promise(saved, later)
        self._ledger.record(masked)
        if len(cuts) == 1:
            return overlapped([self._forward(layer, saved, x, keep, grid, sent, reach, None)])[0], saved
        room = Room(shape, self._scheme.inputs)
        overlapped(
            self._forward(layer, part, x[cut], keep, grid, sent, reach, room.place(cut.start))
            for part, cut in zip(saved.parts, cuts, strict=True)
        )
        return room.whole(_dtype(x)), saved

    def _forward(
        self,
        layer: Layer,
        saved: Saved,
        x: Tensor,
        keep: bool,
        grid: real.Grid,
        sent: checks.Sent,
        reach: checks.Reach,
        into: Into | None,
    ) -> Steps[Tensor]:
        code, op, w = saved.code, saved.weights.op, saved.weights.tensor
        assert code is not None
        # 1. Mask, with fresh noise.
        noise = self._randomness.fresh()
        made, values = self._shares(code.A, grid, x, noise)
        shares = made.unbind()
        saved.stream = noise.number
        if keep:
            saved.values, saved.grid = values, grid
            self._exchange.forget_with(saved)
        # 2. Send.
        with self._exchange.forward(layer, op, code, Maker.of(shares), saved, keep) as asked:
            yield
            # 3. Wait for the answers, unmask and check.
            case = Case(
                decode=partial(self._unmasked, layer, Pass.FORWARD, x, reach, sent),
                verify=lambda y, answers, _: checks.verified_forward(
                    op,
                    y,
                    values,
                    w,
                    self._randomness.fresh(),
                    spread=checks.decoded_spread(reach, sent, answers),
                ),
                given=lambda seat: Given(
                    op=op, kind=Pass.FORWARD, w=w, x_shape=tuple(shares[seat].shape), x=shares[seat]
                ),
                spreads=lambda: checks.answer_spreads(reach, sent),
            )
            return _placed(self._trial.settled(layer, asked.gathered(), case), x, into)

    def backward(self, layer: Layer, saved: Saved, delta: Tensor, passes: tuple[Pass, ...]) -> dict[Pass, Tensor]:
        code, op, w = saved.code, saved.weights.op, saved.weights.tensor
        parts = saved.parts or (saved,)
        x_grid, grid = parts[0].grid, None
        assert code is not None
        assert x_grid is not None
        if code.masks_gradients:
            masked = self._masked(layer, "gradient", code.B, tuple(delta.shape))
            self._budget.backward(layer.label, masked.nats_per_example, saved)
            grid = real.grid_for(code.B, self._arithmetic, self._bounds.of_gradient(layer, delta))
            self._ledger.record(masked)
        else:
            self._budget.backward(layer.label, 0.0, saved)
            self._ledger.record(SentClear(layer=layer.label, examples=delta.shape[0]))
        sent, inputs = self._sent(op, code, grid, delta), self._sent_before(code, x_grid)
        reach = checks.Reach.of(op, Pass.GRAD_INPUT, w, saved.x_shape)
        groups = group_count(delta.shape[0], self._scheme.inputs)
        shapes = (groups, *saved.x_shape[1:]), (groups, *delta.shape[1:])
        products = groups * op.positions(*shapes) * op.copies(shapes[0])
        self._refuse_overflow(_largest(sent) * max(reach.total, _largest(inputs) * products))
        if not saved.parts:
            return overlapped([self._backward(layer, saved, delta, passes, grid, sent, reach, None)])[0]
        room = Room(saved.x_shape, self._scheme.inputs)
        found = overlapped(
            self._backward(layer, part, delta[cut], passes, grid, None, reach, room.place(cut.start))
            for part, cut in zip(saved.parts, saved.cuts, strict=True)
        )
        results = {}
        if Pass.GRAD_INPUT in passes:
            results[Pass.GRAD_INPUT] = room.whole(_dtype(delta))
        if Pass.GRAD_WEIGHT in passes:
            results[Pass.GRAD_WEIGHT] = torch.stack([each[Pass.GRAD_WEIGHT] for each in found]).sum(0)
        return results

    def _backward(
        self,
        layer: Layer,
        saved: Saved,
        delta: Tensor,
        passes: tuple[Pass, ...],
        grid: real.Grid | None,
        sent: checks.Sent | None,
        reach: checks.Reach,
        into: Into | None,
    ) -> Steps[dict[Pass, Tensor]]:
        """grid: of the gradient, None in the clear. sent: what is known of its shares, None if nobody looked yet."""
        code, op, w, dtype = saved.code, saved.weights.op, saved.weights.tensor, self._arithmetic.dtype
        assert code is not None
        assert saved.grid is not None
        # 1. Mask, with noise of its own; or not, if the scheme sends gradients in the clear.
        deltas: Maker | Tensor
        if grid is not None:
            made, values = self._shares(code.B, grid, delta, self._randomness.fresh())
            deltas = Maker.of(made.unbind())
        else:
            values = delta.to(dtype)
            deltas = virtual_batches(values, self._scheme.inputs)
        known = self._sent(op, code, grid, values) if sent is None else sent
        inputs = self._sent_before(code, saved.grid)
        groups = group_count(delta.shape[0], self._scheme.inputs)
        shapes = (groups, *saved.x_shape[1:]), (groups, *delta.shape[1:])

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
                delta=asked.delta(seat),
            )

        cases = {
            Pass.GRAD_INPUT: Case(
                decode=partial(self._unmasked, layer, Pass.GRAD_INPUT, delta, reach, known),
                verify=lambda gx, answers, _: checks.verified_grad_input(
                    op,
                    gx,
                    values,
                    w,
                    saved.x_shape,
                    self._randomness.fresh(),
                    spread=checks.decoded_spread(reach, known, answers),
                ),
                given=partial(given, Pass.GRAD_INPUT),
                spreads=lambda: checks.answer_spreads(reach, known),
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
                    spread=checks.gradient_spread(op, code, inputs, known, *shapes),
                ),
                given=partial(given, Pass.GRAD_WEIGHT),
                spreads=lambda: checks.equation_spreads(op, code, inputs, known, *shapes),
            ),
        }
        # 2. Send.
        with self._exchange.backward(layer, saved, code, deltas, passes, again) as asked:
            yield
            # 3. Wait for the answers, unmask and check.
            gathered = asked.gathered()
            results = {kind: self._trial.settled(layer, gathered[kind], cases[kind]) for kind in passes}
            if Pass.GRAD_INPUT in passes:
                results[Pass.GRAD_INPUT] = _placed(results[Pass.GRAD_INPUT], delta, into)
            return results

    def _sent(self, op: BilinearOp, code: Code, grid: real.Grid | None, delta: Tensor) -> checks.Sent:
        """What is known of the shares of a gradient."""
        dtype = self._arithmetic.dtype
        if grid is not None:
            return checks.Sent.of_shares(code.B, grid, dtype)
        return checks.Sent.in_the_clear(op, code.B, delta.to(dtype), dtype)

    def _sent_before(self, code: Code, grid: real.Grid) -> checks.Sent:
        """And of those of the input."""
        return checks.Sent.of_shares(code.A, grid, self._arithmetic.dtype)

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

    def _shares(self, mixing: Mixing, grid: real.Grid, batch: Tensor, noise: Stream) -> tuple[Tensor, Tensor]:
        """(worker, group, *feature), and the batch on its grid. Every masking has a stream of noise of its own."""
        with phase("encode"):
            return real.encode_batch(mixing, batch, grid, noise, self._arithmetic.dtype)

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
        dtype = torch.float64 if freivalds_checks(self._scheme, kind) else _dtype(batch)
        return real.decode_batch(sent.mixing, answers, len(batch), dtype)


def _dtype(batch: Tensor) -> torch.dtype:
    """Of a result for `batch`: float64, unless that would be rounded to float32 in any case."""
    return torch.float32 if batch.dtype == torch.float32 else torch.float64


def _placed(result: Tensor, batch: Tensor, into: Into | None) -> Tensor:
    """The result of a chunk, in its place."""
    return result if into is None else into(_dtype(batch), len(result)).copy_(result)


def _kept(saved: Saved) -> Tensor:
    """The input as it was encoded."""
    assert saved.values is not None
    return saved.values


def _largest(sent: checks.Sent) -> float:
    """What no element of a share exceeds."""
    sizes = [sent.share(worker) for worker in range(sent.mixing.workers)]
    return max(size.largest + real.TAIL * size.white for size in sizes)
