"""A pass over the workers: who gets what, and who stands in for those that fail (`runtime.gathered`).

Guarantees: results do not depend on who failed (Field: bit for bit; contract tests: tests/runtime/test_faults.py).
Leaks: that a worker failed, and when; nothing about the data decides who takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from darknight.accounting import Ledger, Resent
from darknight.coding import Code, Field, Mixing, Scheme, group_count
from darknight.fleet import Fleet
from darknight.ops import BilinearOp, either
from darknight.runtime.crew import Crew, Order, Round
from darknight.runtime.gathered import Gathered, Mix, OwnParts
from darknight.runtime.layer import Layer, Saved
from darknight.types import BackwardTask, Expected, ForwardTask, Pass

Meanwhile = Callable[[AbstractSet[int]], None]  # what to do for empty seats while workers compute


class Exchange:
    """The passes. Who takes part depends on the scheme and on who failed, never on the data."""

    def __init__(self, scheme: Scheme, fleet: Fleet, ledger: Ledger) -> None:
        self._scheme = scheme
        self.ledger = ledger
        self.prime = scheme.arithmetic.prime if isinstance(scheme.arithmetic, Field) else None
        self.dtype = torch.int32 if isinstance(scheme.arithmetic, Field) else scheme.arithmetic.dtype
        self._crew = Crew(scheme, fleet, ledger, self.prime)
        self._calls = 0

    @property
    def seconds(self) -> tuple[float, float]:
        """Waited for workers, and computed by them, as they say."""
        return self._crew.waiting_seconds, self._crew.worker_seconds

    def open_call(self) -> int:
        """A number that was never used before: of a call, and of the masking of its input or gradient."""
        self._calls += 1
        return self._calls

    def forget_with(self, saved: Saved) -> None:
        """Workers forget the shares of the call when `saved` is gone."""
        self._crew.forget_with(saved, saved.call)

    def forget(self) -> None:
        """Tells workers which calls and weights are over."""
        self._crew.forget()

    # --- passes -----------------------------------------------------------------------------------------------------
    @contextmanager
    def forward(
        self, layer: Layer, op: BilinearOp, code: Code, shares: Tensor, saved: Saved, keep: bool
    ) -> Iterator[Gathered]:
        """Enough answers to decode, by seat. Notes in `saved` who keeps which share."""
        weights, crew, failed = saved.weights, self._crew, set[int]()
        shape = op.output_shape(tuple(shares.shape[1:]), tuple(weights.tensor.shape))
        keeping = frozenset(code.grad_rows if keep else ())

        def task(call: int, share: Tensor, *, compute: bool, keep: bool) -> ForwardTask:
            return ForwardTask(
                layer=layer.name, call=call, version=weights.version, tensor=share, compute=compute, keep=keep
            )

        def expected(groups: int, compute: bool = True) -> Expected:
            return Expected({Pass.FORWARD: (groups, *shape[1:])} if compute else {}, self.dtype, self.prime)

        def order(seat: int, compute: bool) -> Order | None:
            worker = crew.seats.worker(seat)
            if worker is None or worker in failed or not crew.custody.may_send(saved.call, seat, worker):
                return None
            self._note_sent(layer, saved.call, seat, worker)
            return Order(
                holder=crew.now(worker),
                task=task(saved.call, shares[seat], compute=compute, keep=seat in keeping),
                expected=expected(shape[0], compute),
            )

        def ask(seats: Iterable[int], also: Iterable[int] = (), meanwhile: Meanwhile = _nothing) -> Round:
            computing = set(seats)
            orders = {j: made for j in sorted({*computing, *also}) if (made := order(j, j in computing)) is not None}
            found = crew.run(
                layer,
                weights,
                orders,
                key=(layer.name, Pass.FORWARD, shape),
                meanwhile=partial(meanwhile, computing - orders.keys()),
            )
            failed.update(found.lost)
            for seat in keeping & found.answers.keys():
                saved.holders[seat] = orders[seat].holder
            return found

        def question(suspects: Mapping[int, tuple[int, Mix]]) -> Round:
            return crew.question(
                weights,
                key=(layer.name, Pass.FORWARD, shape),
                orders={
                    seat: Order(
                        holder=crew.now(worker),
                        task=task(self.open_call(), mix(shares[seat]), compute=True, keep=False),
                        expected=expected(1),
                    )
                    for seat, (worker, mix) in suspects.items()
                },
            )

        self._begin()
        wanted = self._wanted(Pass.FORWARD, code, lambda seat: crew.seats.worker(seat) is not None)

        def own(seat: int) -> Tensor:
            return either.forward(op, shares[seat], weights.tensor, self.prime)

        gathered = Gathered(
            call=saved.call,
            kind=Pass.FORWARD,
            seats=self._scheme.workers,
            wanted=wanted,
            enough=self._enough(Pass.FORWARD, code),
            ask=ask,
            settle=crew.settle,
            question=question,
            parts=OwnParts(self.ledger, layer, Pass.FORWARD, own),
        )
        try:
            first = ask(wanted, also=keeping, meanwhile=gathered.make)
            _refuse_refusals(first)
            gathered.add(first)
            gathered.fill()
            yield gathered
        finally:
            if not keep:
                crew.custody.forget(saved.call)

    @contextmanager
    def backward(
        self,
        layer: Layer,
        saved: Saved,
        code: Code,
        deltas: Tensor,
        passes: tuple[Pass, ...],
        again: Callable[[int], Tensor],
    ) -> Iterator[dict[Pass, Gathered]]:
        """Enough answers, by pass and seat.

        deltas: (worker, group, *feature), or in the clear (group, input, *feature). again: the input share of a seat,
        made once more.
        """
        weights, crew, failed = saved.weights, self._crew, set[int]()
        clear, masking = not code.masks_gradients, self.open_call()
        share_shape = (group_count(saved.x_shape[0], self._scheme.inputs), *saved.x_shape[1:])
        shapes = {Pass.GRAD_INPUT: share_shape, Pass.GRAD_WEIGHT: tuple(weights.tensor.shape)}

        def holder(seat: int) -> int | None:
            """Who keeps the seat's input share still."""
            return crew.still(saved.holders.get(seat))

        def task(seat: int, delta: Tensor, kinds: tuple[Pass, ...], x_shape: tuple[int, ...]) -> BackwardTask:
            return BackwardTask(
                layer=layer.name,
                call=saved.call,
                version=weights.version,
                tensor=delta,
                passes=kinds,
                x_shape=x_shape,
                row=_coefficients(code.B.data[seat], self.prime) if clear else None,
            )

        def order(seat: int, kinds: tuple[Pass, ...], taken: set[int]) -> Order | None:
            keeper, first = holder(seat), None
            worker = crew.seats.worker(seat) if keeper is None else keeper
            if worker is None or worker in failed | taken:
                return None
            if not clear and not crew.custody.may_send(masking, seat, worker):
                return None
            if Pass.GRAD_WEIGHT in kinds and keeper is None:
                if not crew.custody.may_send(saved.call, seat, worker):
                    return None
                self._note_sent(layer, saved.call, seat, worker)
                first = ForwardTask(
                    layer=layer.name,
                    call=saved.call,
                    version=weights.version,
                    tensor=again(seat),
                    compute=False,
                    keep=True,
                )
            if not clear:
                self._note_sent(layer, masking, seat, worker)
            expected = Expected({kind: shapes[kind] for kind in kinds}, self.dtype, self.prime)
            made = task(seat, deltas if clear else deltas[seat], kinds, share_shape)
            return Order(holder=crew.now(worker), task=made, expected=expected, first=first)

        def ask(kinds: Mapping[int, tuple[Pass, ...]], meanwhile: Meanwhile = _nothing) -> Round:
            orders: dict[int, Order] = {}
            for seat in sorted(kinds):
                made = order(seat, kinds[seat], {placed.worker for placed in orders.values()})
                if made is not None:
                    orders[seat] = made
            found = crew.run(
                layer,
                weights,
                orders,
                key=(layer.name, passes, share_shape),
                meanwhile=partial(meanwhile, kinds.keys() - orders.keys()),
            )
            failed.update(found.lost)
            for seat in found.answers:
                if orders[seat].first is not None:
                    saved.holders[seat] = orders[seat].holder
            return found

        def question(kind: Pass, suspects: Mapping[int, tuple[int, Mix]]) -> Round:
            one = (1, *share_shape[1:])
            return crew.question(
                weights,
                key=(layer.name, passes, share_shape),
                orders={
                    seat: Order(
                        holder=crew.now(worker),
                        task=task(seat, mix(deltas if clear else deltas[seat]), (kind,), one),
                        expected=Expected({kind: one}, self.dtype, self.prime),
                    )
                    for seat, (worker, mix) in suspects.items()
                },
            )

        def own(kind: Pass, seat: int) -> Tensor:
            op, w = weights.op, weights.tensor
            delta = self.clear_share(code, deltas, seat) if clear else deltas[seat]
            if kind is Pass.GRAD_INPUT:
                return either.grad_input(op, delta, w, share_shape, self.prime)
            return either.grad_weight(op, again(seat), delta, tuple(w.shape), self.prime)

        def gather(kind: Pass) -> Gathered:
            def there(seat: int) -> bool:
                return holder(seat) is not None or crew.seats.worker(seat) is not None

            return Gathered(
                call=saved.call,
                kind=kind,
                seats=self._scheme.workers,
                wanted=self._wanted(kind, code, there),
                enough=self._enough(kind, code),
                ask=lambda seats: ask(dict.fromkeys(seats, (kind,))),
                settle=crew.settle,
                question=partial(question, kind),
                parts=OwnParts(self.ledger, layer, kind, partial(own, kind)),
            )

        self._begin()
        gathered = {kind: gather(kind) for kind in passes}

        def make(vacant: AbstractSet[int]) -> None:
            for part in gathered.values():
                part.make(vacant)

        everyone = sorted({seat for part in gathered.values() for seat in part.wanted})
        kinds = {seat: tuple(kind for kind in passes if seat in gathered[kind].wanted) for seat in everyone}
        try:
            first = ask(kinds, make)
            _refuse_refusals(first)
            for part in gathered.values():
                part.add(first)
            for part in gathered.values():
                part.fill()
            yield gathered
        finally:
            crew.custody.forget(masking)

    def clear_share(self, code: Code, deltas: Tensor, seat: int) -> Tensor:
        """What the worker of a seat makes of gradients in the clear."""
        return either.combine_clear(_coefficients(code.B.data[seat], self.prime), deltas, self.prime)

    def expel(self, worker: int, reason: str) -> None:
        """Puts the worker out."""
        self._crew.expel(worker, reason)

    def is_out(self, worker: int) -> bool:
        return self._crew.is_out(worker)

    def name(self, worker: int) -> str:
        return self._crew.name(worker)

    # --- who --------------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        self._crew.forget()
        self._crew.settle()

    def _enough(self, kind: Pass, code: Code) -> int | None:
        """K + M if any such answers will do. Parity wants all of them, and a weight gradient is a sum: then None."""
        masked = kind is Pass.FORWARD or code.masks_gradients
        if kind is not Pass.GRAD_WEIGHT and masked and self._scheme.integrity in ("freivalds", "off"):
            return _enough(code.A if kind is Pass.FORWARD else code.B)
        return None

    def _wanted(self, kind: Pass, code: Code, there: Callable[[int], bool]) -> tuple[int, ...]:
        """Seats that compute in this pass: those that decode and the spares; with parity, all.

        If one of them is empty from the start, another that would be idle computes in its place.
        """
        mixing, everyone = (code.A if kind is Pass.FORWARD else code.B), range(self._scheme.workers)
        if kind is Pass.GRAD_WEIGHT or not mixing.colluders:
            return code.grad_rows
        if self._scheme.integrity in ("parity", "both"):
            return tuple(everyone)
        usual = [seat for seat in everyone if seat in mixing.base or seat >= self._scheme.base_workers]
        idle = [seat for seat in everyone if seat not in usual and there(seat)]
        short = _enough(mixing) - sum(there(seat) for seat in usual)
        return (*usual, *idle[: max(0, short)])

    def _note_sent(self, layer: Layer, masking: int, seat: int, worker: int) -> None:
        """Asks leave of the custody, which raises where a share may not go."""
        if self._crew.custody.sent(masking, seat, worker):
            self.ledger.record(Resent(layer=layer.label, seat=seat, worker=self._crew.name(worker)))


def _nothing(_: AbstractSet[int]) -> None:
    pass


def _enough(mixing: Mixing) -> int:
    """How many answers decode."""
    return mixing.inputs + mixing.colluders


def _refuse_refusals(first: Round) -> None:
    """If everybody refuses a task, it is the task that is wrong, or a limit too low: that is an error.

    Only the first round asks everybody: later ones ask those who stand in, of whom one may say what it likes.
    """
    if len(first.lost) > 1 and not first.answers and first.refused.issuperset(first.lost):
        raise first.lost[min(first.lost)]


def _coefficients(row: tuple[object, ...], prime: int | None) -> tuple[float, ...]:
    return tuple(float(value) if prime is None else int(value) for value in row)  # type: ignore[arg-type, call-overload]
