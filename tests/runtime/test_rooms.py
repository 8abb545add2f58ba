"""Shares are made where their workers read them, and can write to them: what the enclave uses of them stays right.

Real links over shared memory, to workers in this process; the first of them does something to the shares it was sent.
"""

import gc
import os
from contextlib import ExitStack, contextmanager

import pytest
import torch

import darknight as dk
from darknight.fleet import Fleet, Member
from darknight.runtime.crew import Crew
from darknight.runtime.masking import Masking
from darknight.runtime.sending import BackwardRound
from darknight.types import BackwardTask, ForwardTask
from darknight.wire import grpc_link
from darknight.wire.shared_memory import Memory
from darknight.worker import Executor, serve
from runtime.liars import step
from runtime.scripts import batch, network
from wire.peers import EchoSession, bench

SCHEME = dk.Scheme(inputs=2, colluders=1)

pytestmark = pytest.mark.usefixtures("one_thread")


class Seat:
    """A seat whose worker overwrites the first share of this kind. dies: and is gone."""

    def __init__(self, seat, kind=None, *, dies=False):
        self._seat = seat
        self._kind = kind
        self._dies = dies

    def read(self):
        found = self._seat.read()
        if found is not None and self._kind is not None and isinstance(found[1], self._kind):
            found[1].tensor.fill_(1)
            self._kind = None
            if self._dies:
                self._seat.close()
                return None
        return found

    def write(self, ticket, reply):
        self._seat.write(ticket, reply)

    def close(self):
        self._seat.close()


class Session(EchoSession):
    def __init__(self, kind, dies):
        super().__init__()
        self._kind, self._dies = kind, dies

    def serve(self, seat):
        serve(Seat(seat, self._kind, dies=self._dies), Executor())


@contextmanager
def protected(kind=None, *, dies=False, standbys=0):
    """A network and its runtime; the worker of seat 0 overwrites a share of this kind."""
    with ExitStack() as stack:
        members = []
        for number in range(SCHEME.workers + standbys):
            how = (kind, dies) if number == 0 else (None, False)
            name = f"@darknight-rooms-{os.getpid()}-{number}-{id(stack)}"
            made = stack.enter_context(bench(lambda peer, how=how: Session(*how), shared_memory=name))
            members.append(Member(f"w{number}", f"operator-{number}", made.connect))
        fleet = stack.enter_context(Fleet(members))
        runtime = stack.enter_context(dk.Runtime(SCHEME, fleet))
        model = network()
        dk.protect_(model, runtime)
        yield model, runtime
    gc.collect()  # mappings go with the last tensor in them, and another test may count them


def alone():
    with dk.Runtime(SCHEME, None) as runtime:
        model = network()
        dk.protect_(model, runtime)
        step(model)
        return [parameter.grad for parameter in model.parameters()]


def is_right(model):
    return all(map(torch.equal, (parameter.grad for parameter in model.parameters()), alone()))


def test_no_share_is_copied(monkeypatch):
    copied, put = [], Memory.put
    monkeypatch.setattr(Memory, "put", lambda self, tensor: copied.append(tensor) or put(self, tensor))
    with protected() as (model, _):
        step(model)
        assert is_right(model)
    assert copied == []


@pytest.mark.parametrize("kind", [ForwardTask, BackwardTask])
def test_who_overwrites_its_share_and_computes_with_it_is_named(kind):
    with protected(kind) as (model, runtime):
        step(model)
        assert is_right(model)
        assert {event.worker for event in runtime.ledger.blamed} == {"w0"}


def test_a_share_that_its_worker_has_overwritten_is_made_again_for_a_standby():
    with protected(BackwardTask, dies=True, standbys=1) as (model, runtime):
        step(model)
        assert is_right(model)
        assert not runtime.ledger.blamed
        assert not runtime.ledger.unexplained


def test_who_reads_a_share_where_its_worker_can_write_has_no_right_result(monkeypatch):
    """The control: the same worker and standby, and an enclave that sends on what it finds in the room."""
    make = Masking.__init__

    def trusting(self, maker, rooms):
        make(self, maker, rooms)
        self._made.update({seat: room.tensor for seat, room in self._rooms.items()})

    monkeypatch.setattr(Masking, "__init__", trusting)
    nobody = pytest.raises(dk.errors.IntegrityError, match="Not even the enclave's own computation passes")
    with protected(BackwardTask, dies=True, standbys=1) as (model, _), nobody:
        step(model)


@pytest.mark.parametrize("broken", [False, True])
def test_who_is_dialled_again_between_masking_and_sending_is_no_liar(broken, monkeypatch):
    """Its share lies in the memory of the link before. The control empties that at once, and sends what is there."""
    sent, again = Crew._sent, []

    def dialled_again(self, weights, orders, *notes):
        if not again:
            again.append(self._fleet._lines[0])
            again[0].close()
            again[0].dial(now=True)
        return sent(self, weights, orders, *notes)

    monkeypatch.setattr(Crew, "_sent", dialled_again)
    if broken:
        monkeypatch.setattr(grpc_link, "is_room", lambda tensor: False)
        monkeypatch.setattr(Memory, "keep", lambda self, block, tensor: None)
    with protected() as (model, runtime):
        step(model)
        assert is_right(model)
        assert [event.worker for event in runtime.ledger.blamed] == (["w0"] if broken else [])
        assert again[0].epoch == 2


@pytest.mark.parametrize("changed", [False, True])
def test_a_share_of_an_input_that_was_overwritten_is_not_made_again(changed):
    """In the backward pass, after it was looked at: the worker that has lost it would get another one."""
    with protected(standbys=1) as (model, runtime):
        x, target = batch(6)
        first = next(iter(runtime._layers.values()))
        seen = BackwardRound.begin

        def begin(self):
            if self._layer is first:
                runtime.fleet._lines[0].close()
                x.data.add_(1.0 if changed else 0.0)
            seen(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BackwardRound, "begin", begin)
            loss = torch.nn.functional.cross_entropy(model(x), target)
            if not changed:
                loss.backward()
                return
            with pytest.raises(dk.errors.EncodingError, match="overwritten while workers computed"):
                loss.backward()


def test_every_room_is_used_or_given_back():
    with protected() as (model, runtime):
        step(model)
        lendings = [line._link._stream._lending for line in runtime.fleet._lines]
        assert all(lending._rooms == {} for lending in lendings)
        del model
        gc.collect()
        runtime.tidy()
        step(network_of(runtime))
        assert all(lending._rooms == {} for lending in lendings)


def network_of(runtime):
    model = network()
    dk.protect_(model, runtime)
    return model


def test_a_share_is_in_custody_before_it_is_written():
    """So a worker that holds another share of the masking gets no room for this one."""
    with protected() as (_, runtime):
        desk = runtime._exchange._desk
        layer = next(iter(runtime._layers.values()))
        masking = desk.open_call()
        assert desk.rooms(layer, masking, {0: 0, 2: None}, (1, 3)).keys() == {0}
        assert desk.crew.custody._maskings[masking] == {0: {0}}
        assert desk.rooms(layer, masking, {1: 0}, (1, 3)) == {}
        assert desk.rooms(layer, masking, {1: 1}, (1, 3)).keys() == {1}
