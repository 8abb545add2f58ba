"""When a block of shared memory may be used again: never while the worker may still read or write it."""

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from darknight.types import Answer, Forget, Pass
from darknight.wire.lending import Lending
from darknight.wire.shared_memory import Block
from wire.peers import backward, expected, task, weights


class FakeMemory:
    """Counts blocks, and refuses to free one twice."""

    def __init__(self):
        self.live = set()
        self.weights = {}
        self._next = 0

    def reserve(self, nbytes):
        self._next += 64
        block = Block(1, self._next, nbytes)
        self.live.add(block)
        return block

    def put(self, tensor):
        return self.reserve(tensor.nbytes)

    def put_weights(self, message):
        block = Block(2, message.version * 64, message.tensor.nbytes)
        self.weights[message.layer, message.version] = block
        return block

    def forget_weights(self, layer, version):
        del self.weights[layer, version]

    def show(self, shape, dtype, *, keep):
        block = self.reserve(prod(shape) * dtype.itemsize)
        return block, self.look(block, shape, dtype)

    def free(self, *blocks):
        for block in blocks:
            self.live.remove(block)

    def take(self, block, shape, dtype):
        assert block in self.live
        return torch.zeros(shape, dtype=dtype)

    look = take

    def keep(self, block, tensor):
        assert block in self.live

    def let_go(self, block):
        assert block in self.live

    def close(self):
        pass


class Link:
    """The little that a link does: tickets, and which tasks are open."""

    def __init__(self):
        self.memory = FakeMemory()
        self.lending = Lending(self.memory)
        self.tickets = 0
        self.open = {}

    def ask(self, message):
        loan = self.lending.lend(message, expected(message))
        self.tickets += 1
        self.open[self.tickets] = loan
        self.lending.asked(self.tickets, loan)
        return self.tickets

    def post(self, message):
        self.tickets += 1
        if isinstance(message, Forget):
            self.lending.forgets(self.tickets, message, self.oldest())
        else:
            self.lending.lend_weights(message)

    def oldest(self):
        return next(iter(self.open), self.tickets + 1)

    def answer(self, ticket):
        loan = self.open.pop(ticket)
        self.lending.answered(ticket, self.oldest())
        return loan


class Reader(Link):
    """One that reads answers in place."""

    def ask(self, message):
        self.form = replace(expected(message), lent=True)
        loan = self.lending.lend(message, self.form)
        self.tickets += 1
        self.open[self.tickets] = loan
        self.lending.asked(self.tickets, loan)
        return self.tickets

    def answer(self, ticket):
        tensors = self.lending.collect(self.open.pop(ticket), self.form)
        answer = Answer(layer="net.0", call=1, tensors=tensors, seconds=0.0)
        return self.lending.answered(ticket, self.oldest(), answer)


def test_an_answer_that_is_read_in_place_keeps_its_blocks_until_it_is_released():
    link = Reader()
    answer = link.answer(link.ask(backward()))
    assert len(link.memory.live) == 2  # of two passes; the share is free
    answer.release()
    assert link.memory.live == set()
    answer.release()  # and twice is no error, also if somebody has the block by now
    other = link.ask(backward())
    answer.release()
    del answer
    link.answer(link.ask(task())).release()
    assert {*link.open[other].answers.values(), link.open[other].share} == link.memory.live


def test_an_answer_in_place_that_nobody_has_any_more_is_given_back_with_the_next_task():
    link = Reader()
    answer = link.answer(link.ask(backward()))
    kept = answer.tensors[Pass.GRAD_INPUT]
    del answer
    ticket = link.ask(task())
    loan = link.open[ticket]
    assert len(link.memory.live - {loan.share, *loan.answers.values()}) == 1  # somebody still has one of the two
    del kept
    link.answer(ticket).release()
    assert link.memory.live == set()


def test_a_refusal_of_what_was_to_be_read_in_place_frees_its_blocks():
    link = Reader()
    ticket = link.ask(backward())
    Link.answer(link, ticket)  # nobody was handed anything
    assert link.memory.live == set()


def test_an_answer_in_place_that_outlives_its_link_may_still_be_released():
    """What becomes of its memory: tests/wire/test_shared_memory.py."""
    link = Reader()
    answer = link.answer(link.ask(backward()))
    link.lending.close()
    answer.release()
    answer.release()


def test_a_task_gets_a_place_for_each_answer():
    link = Link()
    message = backward()
    loan = link.lending.lend(message, expected(message))
    header = json.loads(b"{" + loan.places() + b"}")
    assert header["answers"].keys() == {"grad_input", "grad_weight"}
    places = [header["place"], *header["answers"].values()]
    assert len({tuple(place) for place in places}) == 3
    assert link.lending.collect(loan, expected(message))[Pass.GRAD_INPUT].shape == (2, 3)


def test_everything_of_an_answered_task_is_free_again():
    link = Link()
    first, second = link.ask(task()), link.ask(backward())
    link.answer(second)
    assert len(link.memory.live) == 2
    link.answer(first)
    assert link.memory.live == set()


def test_a_kept_share_stays_until_it_is_forgotten():
    link = Link()
    loan = link.answer(link.ask(task(5, keep=True)))
    assert link.memory.live == {loan.share}
    link.answer(link.ask(backward(5)))
    link.post(Forget(calls=(4,)))
    assert link.memory.live == {loan.share}
    link.post(Forget(calls=(5,)))
    assert link.memory.live == set()


def test_what_was_forgotten_stays_while_an_older_task_may_use_it():
    link = Link()
    link.post(weights(1))
    share = link.answer(link.ask(task(5, keep=True))).share
    slow = link.ask(backward(5))  # cancelled perhaps, but the worker does not know
    link.post(Forget(calls=(5,), weights=(("net.0", 1),)))
    later = link.ask(task(6))
    link.answer(later)
    assert share in link.memory.live
    assert link.memory.weights
    link.answer(slow)
    assert link.memory.live == set()
    assert not link.memory.weights


def test_a_share_that_is_forgotten_before_its_task_is_answered():
    link = Link()
    forward = link.ask(task(5, keep=True))
    slow = link.ask(backward(5))
    link.post(Forget(everything=True))
    share = link.answer(forward).share
    assert share in link.memory.live  # the backward task reads it
    link.answer(slow)
    assert link.memory.live == set()


def test_weights_that_come_back_are_not_forgotten_by_an_older_message():
    link = Link()
    link.post(weights(1))
    slow = link.ask(task())
    link.post(Forget(weights=(("net.0", 1),)))
    link.post(weights(1))
    link.answer(slow)
    assert link.memory.weights.keys() == {("net.0", 1)}
    link.post(Forget(weights=(("net.0", 1),)))
    assert not link.memory.weights


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_of_two_shares_for_one_call_the_later_is_kept(order):
    link = Link()
    tickets = [link.ask(task(5, keep=True)), link.ask(backward(5)), link.ask(task(5, keep=True))]
    first, last = link.open[tickets[0]].share, link.open[tickets[2]].share
    for n, which in enumerate(order):
        assert (first in link.memory.live) or 1 in order[:n]  # the backward task reads it
        link.answer(tickets[which])
    assert link.memory.live == {last}


def test_a_share_that_finds_no_room_for_its_answer_is_given_back():
    link = Link()
    link.memory.reserve, put = None, link.memory.reserve
    link.memory.put = lambda tensor: put(tensor.nbytes)
    with pytest.raises(TypeError):
        link.lending.lend(task(), expected(task()))
    assert link.memory.live == set()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("noted", [False, True])
def test_a_task_that_was_not_sent_after_all_holds_up_nothing(keep, noted):
    link = Link()
    link.post(weights(1))
    loan = link.lending.lend(task(5, keep=keep), expected(task()))
    if noted:
        link.lending.asked(link.tickets + 1, loan)
    link.post(Forget(weights=(("net.0", 1),)))
    link.lending.withdrawn(link.tickets, loan, link.tickets + 1)
    assert link.memory.live == set()
    assert not link.memory.weights
    link.post(Forget(everything=True))  # and what is not there is not freed again


@given(st.lists(st.tuples(st.sampled_from(["keep", "use", "plain", "answer", "forget", "all"]), st.integers(0, 3))))
@settings(max_examples=400, deadline=None)
def test_no_block_is_free_while_a_task_may_touch_it_and_all_are_in_the_end(steps):
    link = Link()
    needed = {}  # ticket -> blocks that the worker may touch until it answers
    kept = {}  # call -> share, as a worker that works in order would keep it
    for step, call in steps:
        if step in ("keep", "plain"):
            ticket = link.ask(task(call, keep=step == "keep"))
            loan = link.open[ticket]
            needed[ticket] = {loan.share, *loan.answers.values()}
            if step == "keep":
                kept[call] = loan.share
        elif step == "use":
            ticket = link.ask(backward(call))
            loan = link.open[ticket]
            needed[ticket] = {loan.share, *loan.answers.values()} | ({kept[call]} if call in kept else set())
        elif step == "answer" and link.open:
            ticket = list(link.open)[call % len(link.open)]
            link.answer(ticket)
            del needed[ticket]
        elif step in ("forget", "all"):
            link.post(Forget(calls=(call,)) if step == "forget" else Forget(everything=True))
            kept = {} if step == "all" else {key: share for key, share in kept.items() if key != call}
        assert set().union(*needed.values(), kept.values()) <= link.memory.live
    for ticket in list(link.open):
        link.answer(ticket)
    link.post(Forget(everything=True))
    assert link.memory.live == set()


def test_a_share_that_was_made_in_its_room_is_not_written_again():
    link = Link()
    room = link.lending.room((2, 3), torch.float32)
    (block,) = link.memory.live
    ticket = link.ask(task(tensor=room))
    assert link.open[ticket].share == block
    del room
    other = link.ask(task())
    assert block in link.memory.live  # the worker may still read it
    assert link.open[other].share != block
    link.answer(ticket)
    assert block not in link.memory.live


def test_a_room_that_nobody_asks_with_is_given_back():
    link = Link()
    room = link.lending.room((2, 3), torch.float32)
    (block,) = link.memory.live
    del room
    link.answer(link.ask(task()))
    assert block not in link.memory.live
    assert link.lending._rooms == {}


def test_a_view_of_a_room_is_a_share_like_any_other():
    """It may be a part of it, and is written where it is whole."""
    link = Link()
    room = link.lending.room((2, 3), torch.float32)
    (block,) = link.memory.live
    assert link.open[link.ask(task(tensor=room[:1]))].share != block


def test_nothing_needs_no_room():
    assert Link().lending.room((0, 3), torch.float32) is None
