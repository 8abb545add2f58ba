"""Answers are decoded where their workers can still write: whenever one changes what it wrote, results stay right.

Real links over shared memory, to workers in this process; one of them writes to its answers when the test says so.
"""

import gc
import os
from contextlib import ExitStack, contextmanager

import pytest
import torch

import darknight as dk
from darknight.fleet import Fleet, Member
from darknight.runtime.gathered import Gathered
from darknight.runtime.trial import Trial
from darknight.types import Answer, Pass
from darknight.worker import Executor, serve
from runtime.liars import off_by_one, step
from runtime.scripts import network
from wire.peers import EchoSession, bench

SCHEME = dk.Scheme(inputs=2, colluders=1)
# The gradient of the input goes the way of forward: with --full.
PASSES = pytest.mark.parametrize(
    "kind",
    [Pass.FORWARD, pytest.param(Pass.GRAD_INPUT, marks=pytest.mark.full), Pass.GRAD_WEIGHT],
    ids=lambda kind: kind.value,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Hands:
    """A seat whose worker keeps its hands on the answers to one pass. lies: it begins with a wrong one."""

    def __init__(self, kind=None, *, lies=False):
        self._kind = kind
        self._lies = lies
        self._written = []  # where its answers are in shared memory, and what is right there
        self.seat = None

    def read(self):
        return self.seat.read()

    def write(self, ticket, reply):
        places = self.seat._due.get(ticket)
        if isinstance(reply, Answer) and self._kind in reply.tensors:
            right = reply.tensors[self._kind].clone()
            place = places[self._kind]
            at = self.seat._segments().tensor(place, right.dtype, tuple(right.shape), writable=True)
            self._written = [(at, right)]
            if self._lies:
                off_by_one(reply.tensors[self._kind])
        self.seat.write(ticket, reply)

    def close(self):
        self.seat.close()

    def change(self, *, to_right):
        for at, right in self._written:
            at.copy_(right if to_right else off_by_one(right.clone()))


class Session(EchoSession):
    """A worker's, through the hands."""

    def __init__(self, hands):
        super().__init__()
        self._hands = hands

    def serve(self, seat):
        self._hands.seat = seat
        serve(self._hands, Executor())


@contextmanager
def protected(hands):
    """A network, its runtime and fleet, in which seat 0 is of `hands`."""
    with ExitStack() as stack:
        members = []
        for number in range(SCHEME.workers):
            own = hands if number == 0 else Hands()
            name = f"@darknight-hands-{os.getpid()}-{id(own)}"
            made = stack.enter_context(bench(lambda peer, own=own: Session(own), shared_memory=name))
            members.append(Member(f"w{number}", f"operator-{number}", made.connect))
        fleet = stack.enter_context(Fleet(members))
        runtime = stack.enter_context(dk.Runtime(SCHEME, fleet))
        model = network()
        dk.protect_(model, runtime)
        yield model, runtime
    hands._written.clear()
    gc.collect()  # mappings go with the last tensor in them, and another test may count them


def alone():
    with dk.Runtime(SCHEME, None) as runtime:
        model = network()
        dk.protect_(model, runtime)
        step(model)
        return [parameter.grad for parameter in model.parameters()]


def is_right(model):
    return all(map(torch.equal, (parameter.grad for parameter in model.parameters()), alone()))


def before_copies(monkeypatch, act):
    """`act` happens when a check has failed, and before anybody looks at the answers again."""
    take_copies = Gathered.take_copies

    def both(self):
        act()
        return take_copies(self)

    monkeypatch.setattr(Gathered, "take_copies", both)


@PASSES
def test_who_changes_a_right_answer_after_it_was_decoded_changes_nothing(kind, monkeypatch):
    hands = Hands(kind)
    checked = Trial._checked

    def then_changed(self, layer, gathered, case):
        result = checked(self, layer, gathered, case)
        if gathered.kind is kind:
            hands.change(to_right=False)
        return result

    monkeypatch.setattr(Trial, "_checked", then_changed)
    with protected(hands) as (model, runtime):
        step(model)
        assert is_right(model)
        assert not runtime.ledger.blamed
        assert not runtime.ledger.unexplained


@PASSES
def test_who_reads_an_answer_twice_uses_what_was_not_checked(kind, monkeypatch):
    """The control: the same worker, against an enclave that decodes once to check, and once more to use it."""
    hands = Hands(kind)
    checked = Trial._checked

    def twice(self, layer, gathered, case):
        result = checked(self, layer, gathered, case)
        if gathered.kind is not kind:
            return result
        hands.change(to_right=False)
        return case.decode(gathered.answers)

    monkeypatch.setattr(Trial, "_checked", twice)
    with protected(hands) as (model, _):
        step(model)
        assert not is_right(model)


@PASSES
def test_who_lies_and_leaves_it_at_that_is_named(kind):
    with protected(Hands(kind, lies=True)) as (model, runtime):
        step(model)
        assert is_right(model)
        assert {event.worker for event in runtime.ledger.blamed} == {"w0"}
        assert not runtime.ledger.unexplained


@PASSES
def test_who_lies_and_repents_before_it_is_looked_at_again_can_do_it_once(kind, monkeypatch):
    hands = Hands(kind, lies=True)
    before_copies(monkeypatch, lambda: hands.change(to_right=True))
    with protected(hands) as (model, runtime):
        step(model)
        assert is_right(model)
        assert len(runtime.ledger.unexplained) == 1
        # The second layer's answers were copied before anybody looked at them.
        assert {event.worker for event in runtime.ledger.blamed} == {"w0"}
        assert list(runtime.fleet.quarantined) == [0]


def test_who_lies_in_another_way_each_time_is_named(monkeypatch):
    hands = Hands(Pass.FORWARD, lies=True)
    before_copies(monkeypatch, lambda: [at.zero_() for at, _ in hands._written])
    with protected(hands) as (model, runtime):
        step(model)
        assert is_right(model)
        assert [event.worker for event in runtime.ledger.blamed] == ["w0"]


@PASSES
def test_who_dies_after_a_right_answer_is_no_liar(kind, monkeypatch):
    """Its segments go with its link, but not what is still to be decoded."""
    hands = Hands(kind)
    decoded = []

    def die(trial, layer, gathered, case):
        if gathered.kind is kind and not decoded:
            decoded.append(kind)
            worker = gathered.by[0]
            trial._exchange._crew._fleet._lines[worker].close()
        return checked(trial, layer, gathered, case)

    checked = Trial._checked
    monkeypatch.setattr(Trial, "_checked", die)
    with protected(hands) as (model, runtime):
        step(model)
        assert decoded
        assert is_right(model)
        assert not runtime.ledger.blamed
        assert not runtime.ledger.unexplained


def test_every_answer_is_released():
    hands = Hands(Pass.FORWARD)
    with protected(hands) as (model, runtime):
        step(model)
        lendings = [line._link._stream._lending for line in runtime.fleet._lines]
        assert all(lending._read == {} for lending in lendings)
        assert all(lending._memory._shown == {} for lending in lendings)
