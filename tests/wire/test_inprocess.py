"""The in-process transport keeps to the contract of a link: order, futures, closing, and no believing."""

import threading

import pytest
import torch

from darknight.types import Answer, Expected, Forget, ForwardTask, Pass, Refusal
from darknight.wire import LinkClosed, Misbehaved, Refused, in_process

EXPECTED = Expected({Pass.FORWARD: (2,)}, torch.int32, 7)


def task(call=1):
    return ForwardTask(layer="a", call=call, version=1, tensor=torch.ones(2), compute=True, keep=False)


def answer(call=1, value=1):
    tensors = {Pass.FORWARD: torch.full((2,), value, dtype=torch.int32)}
    return Answer(layer="a", call=call, tensors=tensors, seconds=0.0)


def test_messages_arrive_in_order():
    link, seat = in_process()
    for number in range(3):
        link.post(Forget(calls=(number,)))
    assert [seat.read()[1] for _ in range(3)] == [Forget(calls=(number,)) for number in range(3)]


def test_answers_come_in_any_order():
    link, seat = in_process()
    asked = [link.ask(task(call), EXPECTED) for call in range(3)]
    tickets = [seat.read()[0] for _ in range(3)]
    for place in (2, 0, 1):
        seat.write(tickets[place], answer(value=place))
    assert [int(future.result(1).tensors[Pass.FORWARD][0]) for future in asked] == [0, 1, 2]


def test_a_refusal_ends_the_task_and_not_the_link():
    link, seat = in_process()
    asked = link.ask(task(), EXPECTED)
    seat.write(seat.read()[0], Refusal(message="no room"))
    with pytest.raises(Refused, match="no room"):
        asked.result(1)
    assert link.failure is None


def test_an_answer_that_is_not_wanted_any_more_is_dropped():
    link, seat = in_process()
    asked = link.ask(task(), EXPECTED)
    assert asked.cancel()
    seat.write(seat.read()[0], answer())
    assert link.failure is None


@pytest.mark.parametrize("twice", [True, False])
def test_an_answer_that_nobody_asked_for_breaks_the_link(twice):
    link, seat = in_process()
    open_one = link.ask(task(1), EXPECTED)
    asked = link.ask(task(2), EXPECTED)
    seat.read()
    ticket = seat.read()[0]
    if twice:
        seat.write(ticket, answer())
        assert asked.result(1)
    seat.write(ticket if twice else 1000, answer())
    with pytest.raises(Misbehaved, match="not asked"):
        open_one.result(1)
    with pytest.raises(Misbehaved):
        link.post(Forget())


def test_a_worker_that_closes_its_end_is_noticed_at_once():
    link, seat = in_process()
    asked = link.ask(task(), EXPECTED)
    threading.Timer(0.05, seat.close).start()
    with pytest.raises(LinkClosed):
        asked.result(30)
    with pytest.raises(LinkClosed):
        link.post(Forget())


def test_a_closed_link_ends_the_workers_reading():
    link, seat = in_process()
    link.post(Forget())
    link.close()
    link.close()
    assert seat.read() is not None
    assert seat.read() is None
    with pytest.raises(LinkClosed):
        link.ask(task(), EXPECTED)
