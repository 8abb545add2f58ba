"""The two kinds of rounds: a forward pass, and a backward pass of a call. Who gets what, in which order.

A round first asks everybody whose answer is wanted (`begin`), which waits for nobody. Who wants the answers
(`gathered`) waits; `runtime.gathered` asks again for what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor

from darknight.coding import Code
from darknight.ops import BilinearOp, either
from darknight.runtime.crew import Asked, Order, Round
from darknight.runtime.desk import Desk
from darknight.runtime.gathered import Gathered, Mix, OwnParts
from darknight.runtime.layer import Layer, Saved
from darknight.runtime.masking import Maker, Masking
from darknight.types import BackwardTask, Expected, ForwardTask, Pass, Seed

Deltas = Maker | Tensor  # in the clear, one tensor for all workers (group, input, *feature)


class ForwardRound:
    """The forward pass of a call. Notes in `saved` who keeps which share."""

    def __init__(
        self, desk: Desk, layer: Layer, op: BilinearOp, code: Code, maker: Maker, saved: Saved, keep: bool
    ) -> None:
        self._desk = desk
        self._crew = desk.crew
        self._layer = layer
        self._op = op
        self._code = code
        self._maker = maker
        self._saved = saved
        self._keeping = frozenset(code.grad_rows if keep else ())
        self._share_shape = desk.share_shape(saved.x_shape)
        self._shape = op.output_shape(self._share_shape, saved.weights.shape)
        self._failed: set[int] = set()
        self._lent: list[Callable[[], None]] = []
        self._begun: tuple[Asked, Gathered] | None = None  # until somebody waits for it
        self._shares: Masking | None = None  # until it begins

    def release(self) -> None:
        """Nobody reads the answers any more, or waits for them."""
        if self._begun is not None:
            self._begun[0].abandon()
            self._begun = None
        _call_all(self._lent)

    def begin(self) -> None:
        """Makes the shares and sends them."""
        desk = self._desk
        desk.begin()
        found = Gathered(
            call=self._saved.call,
            kind=Pass.FORWARD,
            seats=desk.scheme.workers,
            wanted=desk.wanted(Pass.FORWARD, self._code, lambda seat: self._crew.seats.worker(seat) is not None),
            enough=desk.enough(Pass.FORWARD, self._code),
            ask=self._ask,
            settle=self._crew.settle,
            question=self._question,
            parts=OwnParts(desk.ledger, self._layer, Pass.FORWARD, self._own),
        )
        seats = sorted({*found.wanted, *self._keeping} - self._code.A.carriers.keys())
        workers = {seat: self._crew.seats.worker(seat) for seat in seats}
        rooms = desk.rooms(self._layer, self._saved.call, workers, self._share_shape)
        self._shares = Masking(self._maker, rooms)
        orders = self._orders(found.wanted, also=self._keeping)
        self._begun = self._crew.ask(self._layer, self._saved.weights, orders), found

    def gathered(self) -> Gathered:
        """Enough answers to decode."""
        assert self._begun is not None, "it has begun, and is waited for once"
        (asked, found), self._begun = self._begun, None
        vacant = set(found.wanted) - asked.orders.keys()
        first = self._crew.wait(self._layer, asked, self._key, meanwhile=partial(found.make, vacant))
        self._note(asked.orders, first)
        self._crew.warn_of_refusals(self._layer, first, Pass.FORWARD)
        found.add(first)
        found.fill()
        return found

    def _ask(self, seats: Iterable[int]) -> Round:
        orders = self._orders(seats)
        found = self._crew.run(self._layer, self._saved.weights, orders, key=self._key)
        self._note(orders, found)
        return found

    def _note(self, orders: Mapping[int, Order], found: Round) -> None:
        self._failed.update(found.lost)
        self._lent += found.lent.values()
        for seat in self._keeping & found.answers.keys():
            self._saved.holders[seat] = orders[seat].holder

    def _orders(self, seats: Iterable[int], also: Iterable[int] = ()) -> dict[int, Order]:
        computing = set(seats)
        due, nothing = self._desk.expected({Pass.FORWARD: self._shape}, lent=True), self._desk.expected({}, lent=True)
        orders = {}
        for seat in sorted({*computing, *also}):
            made = self._order(seat, seat in computing, due if seat in computing else nothing)
            if made is not None:
                orders[seat] = made
        return orders

    def _order(self, seat: int, compute: bool, expected: Expected) -> Order | None:
        worker, call, masked = self._crew.seats.worker(seat), self._saved.call, self._masked
        if worker is None or worker in self._failed:
            return None
        holder = self._crew.now(worker)
        if not masked.lies_with(seat, holder) and not self._desk.leave_to_send(self._layer, call, seat, worker):
            return None
        return Order(
            holder=holder,
            task=self._task(
                call,
                masked.outgoing(seat, holder),
                compute=compute,
                keep=seat in self._keeping,
                seed=masked.seeds.get(seat),
            ),
            expected=expected,
        )

    def _question(self, suspects: Mapping[int, tuple[int, Mix]]) -> Round:
        orders = {
            seat: Order(
                holder=self._crew.now(worker),
                task=self._task(self._desk.open_call(), mix(self.share(seat)), compute=True, keep=False),
                expected=self._desk.expected({Pass.FORWARD: (1, *self._shape[1:])}),
            )
            for seat, (worker, mix) in suspects.items()
        }
        return self._crew.question(self._saved.weights, orders=orders, key=self._key)

    def share(self, seat: int) -> Tensor:
        """What the worker of a seat was sent, as it was then."""
        return self._masked[seat]

    @property
    def _masked(self) -> Masking:
        assert self._shares is not None, "it has begun"
        return self._shares

    def _own(self, seat: int) -> Tensor:
        return either.forward(self._op, self.share(seat), self._saved.weights.tensor, self._desk.prime)

    def _task(self, call: int, share: Tensor, *, compute: bool, keep: bool, seed: Seed | None = None) -> ForwardTask:
        return ForwardTask(
            layer=self._layer.name,
            call=call,
            version=self._saved.weights.version,
            tensor=share,
            compute=compute,
            keep=keep,
            seed=seed,
        )

    @property
    def _key(self) -> tuple[object, ...]:
        return (self._layer.name, Pass.FORWARD, self._shape)


class BackwardRound:
    """The backward passes of a call.

    again: the input share of a seat, made once more. masking: the number of this masking of the gradient.
    """

    def __init__(
        self,
        desk: Desk,
        layer: Layer,
        saved: Saved,
        code: Code,
        deltas: Deltas,
        passes: tuple[Pass, ...],
        again: Callable[[int], Tensor],
        masking: int,
    ) -> None:
        self._desk = desk
        self._crew = desk.crew
        self._layer = layer
        self._saved = saved
        self._code = code
        self._deltas: Deltas | Masking = deltas  # a masking when it has begun
        self._passes = passes
        self._again = again
        self._masking = masking
        self._clear = not code.masks_gradients
        self._share_shape = desk.share_shape(saved.x_shape)
        self._shapes = {Pass.GRAD_INPUT: self._share_shape, Pass.GRAD_WEIGHT: saved.weights.shape}
        self._keepers: dict[int, int | None] | None = None  # by seat, while it begins
        self._failed: set[int] = set()
        self._lent: list[Callable[[], None]] = []
        self._begun: tuple[Asked, dict[Pass, Gathered]] | None = None  # until somebody waits for it

    def release(self) -> None:
        """Nobody reads the answers any more, or waits for them."""
        if self._begun is not None:
            self._begun[0].abandon()
            self._begun = None
        _call_all(self._lent)

    def begin(self) -> None:
        """Makes the shares and sends them."""
        self._desk.begin()
        self._keepers = {}  # looked up once while it begins: whoever is gone by the time that it is asked is lost then
        try:
            self._begin()
        finally:
            self._keepers = None

    def _begin(self) -> None:
        found = {kind: self._gather(kind) for kind in self._passes}
        everyone = sorted({seat for part in found.values() for seat in part.wanted})
        if isinstance(self._deltas, Maker):
            workers = {seat: self._worker(seat) for seat in everyone if seat not in self._code.B.carriers}
            shape = self._saved.weights.op.output_shape(self._share_shape, self._saved.weights.shape)
            rooms = self._desk.rooms(self._layer, self._masking, workers, shape)
            self._deltas = Masking(self._deltas, rooms)
        kinds = {seat: tuple(kind for kind in self._passes if seat in found[kind].wanted) for seat in everyone}
        self._begun = self._crew.ask(self._layer, self._saved.weights, self._orders(kinds)), found

    def gathered(self) -> dict[Pass, Gathered]:
        """Enough answers, by pass."""
        assert self._begun is not None, "it has begun, and is waited for once"
        (asked, found), self._begun = self._begun, None
        vacant = {seat for part in found.values() for seat in part.wanted} - asked.orders.keys()

        def make() -> None:
            for part in found.values():
                part.make(vacant)

        first = self._crew.wait(self._layer, asked, self._key, meanwhile=make)
        self._note(asked.orders, first)
        self._crew.warn_of_refusals(self._layer, first, *self._passes)
        for part in found.values():
            part.add(first)
        for part in found.values():
            part.fill()
        return found

    def _worker(self, seat: int) -> int | None:
        """Who is asked for a seat's part: who keeps its input share still, or else who sits there."""
        keeper = self._holder(seat)
        return self._crew.seats.worker(seat) if keeper is None else keeper

    def _gather(self, kind: Pass) -> Gathered:
        def there(seat: int) -> bool:
            return self._holder(seat) is not None or self._crew.seats.worker(seat) is not None

        return Gathered(
            call=self._saved.call,
            kind=kind,
            seats=self._desk.scheme.workers,
            wanted=self._desk.wanted(kind, self._code, there),
            enough=self._desk.enough(kind, self._code),
            ask=lambda seats: self._ask(dict.fromkeys(seats, (kind,))),
            settle=self._crew.settle,
            question=partial(self._question, kind),
            parts=OwnParts(self._desk.ledger, self._layer, kind, partial(self._own, kind)),
        )

    def _ask(self, kinds: Mapping[int, tuple[Pass, ...]]) -> Round:
        orders = self._orders(kinds)
        found = self._crew.run(self._layer, self._saved.weights, orders, key=self._key)
        self._note(orders, found)
        return found

    def _note(self, orders: Mapping[int, Order], found: Round) -> None:
        self._failed.update(found.lost)
        self._lent += found.lent.values()
        for seat in found.answers:
            if orders[seat].first is not None:
                self._saved.holders[seat] = orders[seat].holder

    def _orders(self, kinds: Mapping[int, tuple[Pass, ...]]) -> dict[int, Order]:
        orders: dict[int, Order] = {}
        taken: set[int] = set()
        due = {
            passes: self._desk.expected({kind: self._shapes[kind] for kind in passes}, lent=True)
            for passes in set(kinds.values())
        }
        for seat in sorted(kinds):
            made = self._order(seat, kinds[seat], taken, due[kinds[seat]])
            if made is not None:
                orders[seat] = made
                taken.add(made.worker)
        return orders

    def _order(self, seat: int, kinds: tuple[Pass, ...], taken: set[int], expected: Expected) -> Order | None:
        desk, call, first = self._desk, self._saved.call, None
        keeper = self._holder(seat)
        worker = self._crew.seats.worker(seat) if keeper is None else keeper
        if worker is None or worker in self._failed or worker in taken:
            return None
        holder, masking = self._crew.now(worker), self._masking
        lies_there = isinstance(self._deltas, Masking) and self._deltas.lies_with(seat, holder)
        if not self._clear and not lies_there and not desk.may_send(masking, seat, worker):
            return None
        if Pass.GRAD_WEIGHT in kinds and keeper is None:
            if not desk.leave_to_send(self._layer, call, seat, worker):
                return None
            first = ForwardTask(
                layer=self._layer.name,
                call=call,
                version=self._saved.weights.version,
                tensor=self._again(seat),
                compute=False,
                keep=True,
            )
        if not self._clear and not lies_there:
            desk.note_sent(self._layer, masking, seat, worker)
        return Order(
            holder=holder,
            task=self._task(seat, self._outgoing(seat, holder), kinds, self._share_shape, self._seed(seat)),
            expected=expected,
            first=first,
        )

    def _question(self, kind: Pass, suspects: Mapping[int, tuple[int, Mix]]) -> Round:
        one = (1, *self._share_shape[1:])
        orders = {
            seat: Order(
                holder=self._crew.now(worker),
                task=self._task(seat, mix(self._delta(seat)), (kind,), one),
                expected=self._desk.expected({kind: one}),
            )
            for seat, (worker, mix) in suspects.items()
        }
        return self._crew.question(self._saved.weights, orders=orders, key=self._key)

    def delta(self, seat: int) -> Tensor:
        """What the worker of a seat computes with: what it was sent, or what it makes of gradients in the clear."""
        if isinstance(self._deltas, Tensor):
            return self._desk.clear_share(self._code, self._deltas, seat)
        return self._delta(seat)

    def _delta(self, seat: int) -> Tensor:
        """What the worker of a seat was sent, as it was then."""
        assert not isinstance(self._deltas, Maker), "it has begun"
        return self._deltas if isinstance(self._deltas, Tensor) else self._deltas[seat]

    def _outgoing(self, seat: int, holder: tuple[int, int]) -> Tensor:
        return self._deltas.outgoing(seat, holder) if isinstance(self._deltas, Masking) else self._delta(seat)

    def _seed(self, seat: int) -> Seed | None:
        return self._deltas.seeds.get(seat) if isinstance(self._deltas, Masking) else None

    def _own(self, kind: Pass, seat: int) -> Tensor:
        op, w, prime = self._saved.weights.op, self._saved.weights.tensor, self._desk.prime
        delta = self.delta(seat)
        if kind is Pass.GRAD_INPUT:
            return either.grad_input(op, delta, w, self._share_shape, prime)
        return either.grad_weight(op, self._again(seat), delta, tuple(w.shape), prime)

    def _task(
        self, seat: int, delta: Tensor, kinds: tuple[Pass, ...], x_shape: tuple[int, ...], seed: Seed | None = None
    ) -> BackwardTask:
        return BackwardTask(
            layer=self._layer.name,
            call=self._saved.call,
            version=self._saved.weights.version,
            tensor=delta,
            passes=kinds,
            x_shape=x_shape,
            row=self._desk.coefficients(self._code, seat) if self._clear else None,
            seed=seed,
        )

    def _holder(self, seat: int) -> int | None:
        """Who keeps the seat's input share still."""
        known = self._keepers
        if known is None:
            return self._crew.still(self._saved.holders.get(seat))
        if seat not in known:
            known[seat] = self._crew.still(self._saved.holders.get(seat))
        return known[seat]

    @property
    def _key(self) -> tuple[object, ...]:
        return (self._layer.name, self._passes, self._share_shape)


def _call_all(functions: list[Callable[[], None]]) -> None:
    """Each once."""
    while functions:
        functions.pop()()
