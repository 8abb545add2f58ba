"""A pass over the workers: who computes what, and who stands in for those that fail.

In the order of preference, for an answer that is missing:

1. Forward and grad input: another worker's. The systematic code has workers that idle in a pass and hold a share all
   the same; any K + M answers decode. This needs a check that does not need *all* answers (Freivalds).
2. A standby's, which gets the share unchanged. Weight gradients have no redundancy, so theirs begin here.
3. The enclave's own: it makes the share again from the same noise and does that worker's part.

Guarantees: results do not depend on who failed (Field: bit for bit; contract tests: tests/runtime/test_faults.py).
Leaks: that a worker failed, and when; nothing about the data decides who takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import torch
from torch import Tensor

from darknight.accounting import DoneInEnclave, Ledger, Resent
from darknight.coding import Code, Field, Mixing, Scheme, group_count
from darknight.fleet import Fleet
from darknight.ops import BilinearOp, either
from darknight.runtime.crew import Crew, Order, Round
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
    def forward(
        self, layer: Layer, op: BilinearOp, code: Code, shares: Tensor, saved: Saved, keep: bool
    ) -> dict[int, Tensor]:
        """Enough answers to decode, by seat. Notes in `saved` who keeps which share."""
        weights, failed, rounds = saved.weights, set[int](), list[Round]()
        shape = op.output_shape(tuple(shares.shape[1:]), tuple(weights.tensor.shape))
        keeping = frozenset(code.grad_rows if keep else ())

        def order(seat: int, compute: bool) -> Order | None:
            worker = self._crew.seats.worker(seat)
            if worker is None or worker in failed or not self._crew.custody.may_send(saved.call, seat, worker):
                return None
            self._note_sent(layer, saved.call, seat, worker)
            task = ForwardTask(
                layer=layer.name,
                call=saved.call,
                version=weights.version,
                tensor=shares[seat],
                compute=compute,
                keep=seat in keeping,
            )
            expected = Expected({Pass.FORWARD: shape} if compute else {}, self.dtype, self.prime)
            return Order(holder=self._crew.now(worker), task=task, expected=expected)

        def ask(seats: Iterable[int], also: Iterable[int] = (), meanwhile: Meanwhile = _nothing) -> dict[int, Tensor]:
            computing = set(seats)
            orders = {j: made for j in sorted({*computing, *also}) if (made := order(j, j in computing)) is not None}
            found = self._crew.run(
                layer,
                weights,
                orders,
                key=(layer.name, Pass.FORWARD, shape),
                meanwhile=partial(meanwhile, computing - orders.keys()),
            )
            failed.update(found.lost)
            rounds.append(found)
            for seat in keeping & found.answers.keys():
                saved.holders[seat] = orders[seat].holder
            return {seat: found.answers[seat][Pass.FORWARD] for seat in computing & found.answers.keys()}

        self._begin()
        wanted = self._wanted(Pass.FORWARD, code, lambda seat: self._crew.seats.worker(seat) is not None)

        def own(seat: int) -> Tensor:
            return either.forward(op, shares[seat], weights.tensor, self.prime)

        parts = _OwnParts(self, layer, Pass.FORWARD, code, own)
        answers = ask(wanted, also=keeping, meanwhile=parts.make) | parts.made
        _refuse_refusals(rounds[0])
        self._stand_in(Pass.FORWARD, code, wanted, answers, ask, parts)
        if not keep:
            self._crew.custody.forget(saved.call)
        return answers

    def backward(
        self,
        layer: Layer,
        saved: Saved,
        code: Code,
        deltas: Tensor,
        passes: tuple[Pass, ...],
        again: Callable[[int], Tensor],
    ) -> dict[Pass, dict[int, Tensor]]:
        """Enough answers, by pass and seat.

        deltas: (worker, group, *feature), or in the clear (group, input, *feature). again: the input share of a seat,
        made once more.
        """
        weights, crew = saved.weights, self._crew
        failed, rounds = set[int](), list[Round]()
        clear, masking = not code.masks_gradients, self.open_call()
        share_shape = (group_count(saved.x_shape[0], self._scheme.inputs), *saved.x_shape[1:])
        shapes = {Pass.GRAD_INPUT: share_shape, Pass.GRAD_WEIGHT: tuple(weights.tensor.shape)}

        def holder(seat: int) -> int | None:
            """Who keeps the seat's input share still."""
            return crew.still(saved.holders.get(seat))

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
            task = BackwardTask(
                layer=layer.name,
                call=saved.call,
                version=weights.version,
                tensor=deltas if clear else deltas[seat],
                passes=kinds,
                x_shape=share_shape,
                row=_coefficients(code.B.data[seat], self.prime) if clear else None,
            )
            expected = Expected({kind: shapes[kind] for kind in kinds}, self.dtype, self.prime)
            return Order(holder=crew.now(worker), task=task, expected=expected, first=first)

        def ask(
            kinds: Mapping[int, tuple[Pass, ...]], meanwhile: Meanwhile = _nothing
        ) -> dict[int, Mapping[Pass, Tensor]]:
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
            rounds.append(found)
            for seat in found.answers:
                if orders[seat].first is not None:
                    saved.holders[seat] = orders[seat].holder
            return found.answers

        def own(kind: Pass, seat: int) -> Tensor:
            op, w = weights.op, weights.tensor
            if clear:
                delta = either.combine_clear(_coefficients(code.B.data[seat], self.prime), deltas, self.prime)
            else:
                delta = deltas[seat]
            if kind is Pass.GRAD_INPUT:
                return either.grad_input(op, delta, w, share_shape, self.prime)
            return either.grad_weight(op, again(seat), delta, tuple(w.shape), self.prime)

        self._begin()
        wanted = {
            kind: self._wanted(kind, code, lambda seat: holder(seat) is not None or crew.seats.worker(seat) is not None)
            for kind in passes
        }
        parts = {kind: _OwnParts(self, layer, kind, code, partial(own, kind)) for kind in passes}

        def make(vacant: AbstractSet[int]) -> None:
            for kind in passes:
                parts[kind].make(vacant & set(wanted[kind]))

        everyone = {seat for seats in wanted.values() for seat in seats}
        found = ask({seat: tuple(kind for kind in passes if seat in wanted[kind]) for seat in everyone}, make)
        _refuse_refusals(rounds[0])
        results = {}
        for kind in passes:
            answers = {seat: tensors[kind] for seat, tensors in found.items() if kind in tensors} | parts[kind].made

            def ask_for(seats: Iterable[int], kind: Pass = kind) -> dict[int, Tensor]:
                return {seat: tensors[kind] for seat, tensors in ask(dict.fromkeys(seats, (kind,))).items()}

            self._stand_in(kind, code, wanted[kind], answers, ask_for, parts[kind])
            results[kind] = answers
        crew.custody.forget(masking)
        return results

    # --- who --------------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        self._crew.forget()
        self._crew.settle()

    def any_will_do(self, kind: Pass, code: Code) -> bool:
        """Whether any K + M answers are enough: parity wants all of them, and a weight gradient is a sum."""
        masked = kind is Pass.FORWARD or code.masks_gradients
        return kind is not Pass.GRAD_WEIGHT and masked and self._scheme.integrity in ("freivalds", "off")

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

    def _stand_in(
        self,
        kind: Pass,
        code: Code,
        wanted: Sequence[int],
        answers: dict[int, Tensor],
        ask: Callable[[Iterable[int]], Mapping[int, Tensor]],
        parts: _OwnParts,
    ) -> None:
        """Adds to `answers` until they are enough: from workers that idle, from standbys, from the enclave."""
        mixing = code.A if kind is Pass.FORWARD else code.B
        short = len(wanted) - len(answers)
        if self.any_will_do(kind, code):
            idle = [seat for seat in range(self._scheme.workers) if seat not in wanted]
            while (short := _enough(mixing) - len(answers)) > 0 and idle:
                next_ones, idle = idle[:short], idle[short:]
                answers.update(ask(next_ones))
        if short <= 0:
            return
        self._crew.settle()
        missing = [seat for seat in wanted if seat not in answers][:short]
        answers.update(ask(missing))
        for seat in missing:
            if seat not in answers:
                answers[seat] = parts.part(seat)

    def _note_sent(self, layer: Layer, masking: int, seat: int, worker: int) -> None:
        """Asks leave of the custody, which raises where a share may not go."""
        if self._crew.custody.sent(masking, seat, worker):
            self.ledger.record(Resent(layer=layer.label, seat=seat, worker=self._crew.name(worker)))


class _OwnParts:
    """Parts of a pass that the enclave does itself; the ledger hears of each."""

    def __init__(
        self, exchange: Exchange, layer: Layer, kind: Pass, code: Code, compute: Callable[[int], Tensor]
    ) -> None:
        self._exchange = exchange
        self._layer = layer
        self._kind = kind
        self._code = code
        self._compute = compute
        self.made: dict[int, Tensor] = {}

    def make(self, vacant: AbstractSet[int]) -> None:
        """Of seats that nobody holds, while the others compute: if their answers are needed at all."""
        if not self._exchange.any_will_do(self._kind, self._code):
            self.made = {seat: self.part(seat) for seat in sorted(vacant)}

    def part(self, seat: int) -> Tensor:
        self._exchange.ledger.record(DoneInEnclave(layer=self._layer.label, kind=self._kind, seat=seat))
        return self._compute(seat)


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
