"""The products in the field by workers that see only masked shares.

Guarantees: what any M workers receive is uniform and independent of x and delta; a result is returned only if it was
    verified, unless the scheme says integrity="off" (contract tests: tests/runtime/test_privacy.py,
    tests/runtime/test_integrity.py).
Assumes: fresh noise for every masking: each attempt is masked from scratch.
Leaks: shapes, which passes were asked for, and how often an attempt was repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from darknight.accounting import Ledger, Masked, SentClear
from darknight.coding import (
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
from darknight.errors import RangeError
from darknight.integrity import Given
from darknight.ops import BilinearOp
from darknight.randomness import Randomness, Stream
from darknight.runtime.checking import checking, freivalds_checks
from darknight.runtime.chunks import Into, Room, Steps, chunks, overlapped
from darknight.runtime.exchange import Exchange
from darknight.runtime.layer import Layer, Saved, SentWeights
from darknight.runtime.masking import Maker, Rooms
from darknight.runtime.operand import Operand, Product
from darknight.runtime.phases import phase
from darknight.runtime.trial import Case, Trial
from darknight.runtime.unmasking import Unmasking
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
        self._unmasking = Unmasking(scheme, arithmetic.prime, randomness, ledger)

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
        # Coefficients (dense code) and scales are of the whole batch; noise, answers and checks are of each chunk.
        code, shape = draw_code(self._scheme, self._randomness.fresh()), op.output_shape(x.shape, weights.shape)
        self._note_masked(layer, "input", x)
        cuts = chunks(self._scheme, x.shape, shape, weights.shape, torch.int32.itemsize)
        saved = Saved.of(x.shape, weights, code, cuts, self._exchange.open_call)
        doubted = partial(self._doubted, further, len(self._ledger.failed))
        if len(cuts) == 1:
            return overlapped([self._forward(layer, saved, x, keep, finish, None, doubted)])[0], saved
        room = Room(shape, self._scheme.inputs)
        products = overlapped(
            self._forward(layer, part, x.part(cut), keep, finish, room.place(cut.start), doubted)
            for part, cut in zip(saved.parts, cuts, strict=True)
        )
        return _joined(room, products, finish), saved

    def _forward(
        self,
        layer: Layer,
        saved: Saved,
        x: Operand,
        keep: bool,
        finish: Finish | None,
        into: Into | None,
        doubted: Callable[[], bool],
    ) -> Steps[Product]:
        code, weights, op = saved.code, saved.weights, saved.weights.op
        assert code is not None
        noise = self._randomness.fresh()
        saved.stream = noise.number
        if keep:
            self._exchange.forget_with(saved)
        # 1. Mask, with fresh noise, and send.
        with self._exchange.forward(layer, op, code, self._maker(code.A, x, noise), saved, keep) as asked:
            saved.checksum = x.masked_checksum if keep else 0
            yield
            # 2. Wait for the answers, unmask and check.
            gathered = asked.gathered()
            exponent, shape = x.exponent + weights.exponent, op.output_shape(x.shape, weights.shape)
            apart = partial(self._unmasking.unmasked, layer, Pass.FORWARD, code.A, shape[0], exponent, into)
            at_once = partial(self._unmasking.weighed, op, code.A, shape, exponent, finish, into, apart)
            case = Case(
                decode=at_once if self._unmasking.narrow(x) else apart,
                decode_further=apart,
                verify=lambda y, _, further: self._unmasking.verify_forward(op, y, x, weights.tensor, further),
                given=lambda seat: Given(
                    op=op,
                    kind=Pass.FORWARD,
                    w=weights.tensor,
                    x_shape=tuple(asked.share(seat).shape),
                    x=asked.share(seat),
                ),
                further=doubted(),
            )
            return self._trial.settled(layer, gathered, case)

    def backward(
        self, layer: Layer, saved: Saved, x: Operand, delta: Operand, passes: tuple[Pass, ...], *, further: bool
    ) -> dict[Pass, Product]:
        assert saved.code is not None
        if saved.code.masks_gradients:
            self._note_masked(layer, "gradient", delta)
        else:
            self._ledger.record(SentClear(layer=layer.label, examples=delta.shape[0]))
        doubted = partial(self._doubted, further, len(self._ledger.failed))
        if not saved.parts:
            return overlapped([self._backward(layer, saved, x, delta, passes, None, doubted, None)])[0]
        room, wrapped = Room(saved.x_shape, self._scheme.inputs), list[Saved]()
        found = overlapped(
            self._backward(layer, part, x.part(cut), delta.part(cut), passes, room.place(cut.start), doubted, wrapped)
            for part, cut in zip(saved.parts, saved.cuts, strict=True)
        )
        results = {}
        if Pass.GRAD_INPUT in passes:
            results[Pass.GRAD_INPUT] = _joined(room, [each[Pass.GRAD_INPUT] for each in found])
        if Pass.GRAD_WEIGHT in passes:
            parts = [each[Pass.GRAD_WEIGHT] for each in found]
            results[Pass.GRAD_WEIGHT] = self._summed(layer, saved.weights, x, delta, parts, bool(wrapped))
        return results

    def _backward(
        self,
        layer: Layer,
        saved: Saved,
        x: Operand,
        delta: Operand,
        passes: tuple[Pass, ...],
        into: Into | None,
        doubted: Callable[[], bool],
        wrapped: list[Saved] | None,
    ) -> Steps[dict[Pass, Product]]:
        """wrapped: of a chunk, is added to `wrapped` if its weight gradient left the field's range: that of the whole
        batch may be in it.
        """
        code, sent = saved.code, saved.weights
        op, w = sent.op, sent.tensor
        assert code is not None
        deltas = self._maker(code.B, delta, self._randomness.fresh()) if code.masks_gradients else self._clear(delta)

        def again(seat: int) -> Tensor:
            """A share of x that its worker has lost, from the same noise."""
            noise = self._randomness.replay(saved.stream)
            return x.share(code.A, self._prime, noise, seat, masked=saved.checksum)

        def given(kind: Pass, seat: int) -> Given:
            return Given(
                op=op,
                kind=kind,
                w=w,
                x_shape=(group_count(saved.x_shape[0], self._scheme.inputs), *saved.x_shape[1:]),
                x=again(seat) if kind is Pass.GRAD_WEIGHT else None,
                delta=asked.delta(seat),
            )

        exponent = delta.exponent + sent.exponent
        apart = partial(self._unmasking.unmasked, layer, Pass.GRAD_INPUT, code.B, delta.shape[0], exponent, into)
        weighed = partial(self._unmasking.weighed, op, code.B, saved.x_shape, exponent, None, into, apart)
        together = delta.exponent + x.exponent
        narrow, whole = self._unmasking.narrow(x, delta), wrapped is None

        def summed(answers: dict[int, Tensor]) -> Product:
            return Product.of(*field.decode_gradient_values(code, answers, together), together)

        def verify_sum(gw: Product, _: object, further: bool) -> None:
            try:
                self._unmasking.verify_grad_weight(op, gw, x, delta, sent.shape, further)
            except RangeError:
                if wrapped is None:
                    raise
                wrapped.append(saved)

        # 1. Mask, with noise of its own, and send.
        with self._exchange.backward(layer, saved, code, deltas, passes, again) as asked:
            yield
            # 2. Wait for the answers, unmask and check.
            gathered, further = asked.gathered(), doubted()
            cases = {
                Pass.GRAD_INPUT: Case(
                    decode=weighed if narrow else apart,
                    decode_further=apart,
                    verify=lambda gx, _, further: self._unmasking.verify_grad_input(
                        op, gx, delta, w, saved.x_shape, further
                    ),
                    given=partial(given, Pass.GRAD_INPUT),
                    further=further,
                ),
                Pass.GRAD_WEIGHT: Case(  # sums of chunks are added up, so they are needed as integers
                    decode=partial(self._unmasking.weighed_gradient, op, code, sent.shape, together, summed)
                    if narrow and whole
                    else summed,
                    decode_further=summed,
                    verify=verify_sum,
                    given=partial(given, Pass.GRAD_WEIGHT),
                    further=further,
                ),
            }
            return {kind: self._trial.settled(layer, gathered[kind], cases[kind]) for kind in passes}

    def _summed(
        self, layer: Layer, weights: SentWeights, x: Operand, delta: Operand, parts: Sequence[Product], wrapped: bool
    ) -> Product:
        """The weight gradient of a batch from those of its chunks, each of which is right modulo the prime.

        So their sum is, and it is right if it is in range. That is seen by looking, if every chunk's was; else by the
        check of a whole batch, which a sum that left the range fails in any case.
        """
        kind, prime = Pass.GRAD_WEIGHT, self._prime
        total = sum(each.whole.to(torch.int64) for each in parts)
        assert isinstance(total, Tensor)
        centred = (total + prime // 2).remainder_(prime).sub_(prime // 2)
        product = Product(centred.to(torch.int32), delta.exponent + x.exponent)
        if freivalds_checks(self._scheme, kind):
            if wrapped:
                with phase("check"), checking(self._ledger, layer, kind, "freivalds"):
                    self._unmasking.verify_grad_weight(weights.op, product, x, delta, weights.shape, further=True)
            elif not torch.equal(total, centred):
                complaint = f"{kind.value}: the sum of chunks exceeds the field's range."
                raise RangeError(complaint, kind=kind.value, check="range")
        return product

    def _doubted(self, further: bool, failed: int) -> bool:
        """Whether the checks that follow are not the first of their call: then they have a repetition more.

        failed: how many checks had failed before the call. Until one of this call does, a lie in several chunks has no
        better chance than in one: the first that is looked at is noticed, or the bound is used up.
        """
        return further or len(self._ledger.failed) > failed

    def _maker(self, mixing: Mixing, batch: Operand, noise: Stream) -> Maker:
        """Every masking has a stream of noise of its own."""

        def again(seat: int) -> Tensor:
            return batch.share(mixing, self._prime, self._randomness.replay(noise.number), seat)

        return Maker(lambda rooms: self._shares(mixing, batch, noise, rooms), again)

    def _shares(self, mixing: Mixing, batch: Operand, noise: Stream, rooms: Rooms) -> MaskedShares:
        """By worker, (group, *feature)."""
        with phase("encode"):
            return batch.shares(mixing, self._prime, noise, rooms)

    def _note_masked(self, layer: Layer, what: str, batch: Operand) -> None:
        """Before anything of it is sent."""
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

    def _clear(self, delta: Operand) -> Tensor:
        groups = virtual_batches(delta.integers, self._scheme.inputs)
        return groups.remainder(self._prime).to(torch.int32)


def _joined(room: Room, products: Sequence[Product], finish: Finish | None = None) -> Product:
    """The results of chunks, which are in their places."""
    floats, finished = room.whole(torch.float32), any(each.finished for each in products)
    if finished and finish is not None:  # a chunk that was decoded once more has only been unmasked
        for each in products:
            if not each.finished and each.floats is not None:
                finish.applied(each.floats)
    integers = None if any(each.integers is None for each in products) else room.whole(torch.int32)
    return Product(integers, products[0].exponent, floats, finished=finished)
