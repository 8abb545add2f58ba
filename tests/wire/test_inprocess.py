"""The in-process transport: order, tickets, timeouts, closing."""

import threading

import pytest

from darknight.types import Forget, Refusal
from darknight.wire import LinkClosed, LinkTimeout, in_process


def test_messages_arrive_in_order_with_their_tickets():
    link, seat = in_process()
    tickets = [link.send(Forget(calls=(number,))) for number in range(3)]
    assert [seat.read() for _ in range(3)] == [(t, Forget(calls=(n,))) for n, t in enumerate(tickets)]


def test_replies_to_older_tickets_are_dropped():
    """As after an interrupted call: its answers arrive later, and belong to nobody."""
    link, seat = in_process()
    old, new = link.send(Forget()), link.send(Forget())
    seat.write(old, Refusal(message="old"))
    seat.write(new, Refusal(message="new"))
    assert link.receive(new, timeout=1).message == "new"


def test_a_flood_of_other_answers_is_a_timeout_too():
    link, seat = in_process()
    wanted = link.send(Forget())
    stop = threading.Event()

    def flood():
        while not stop.is_set():
            seat.write(0, Refusal(message="not asked"))

    thread = threading.Thread(target=flood)
    thread.start()
    with pytest.raises(LinkTimeout):
        link.receive(wanted, timeout=0.2)
    stop.set()
    thread.join()


def test_silence_is_a_timeout():
    link, _ = in_process()
    with pytest.raises(LinkTimeout):
        link.receive(link.send(Forget()), timeout=0.01)


def test_a_worker_that_closes_its_end_is_noticed_at_once():
    link, seat = in_process()
    ticket = link.send(Forget())
    threading.Timer(0.05, seat.close).start()
    with pytest.raises(LinkClosed):
        link.receive(ticket, timeout=30)
    with pytest.raises(LinkClosed):
        link.send(Forget())


def test_a_closed_link_ends_the_workers_reading():
    link, seat = in_process()
    link.send(Forget())
    link.close()
    assert seat.read() is not None
    assert seat.read() is None
    with pytest.raises(LinkClosed):
        link.send(Forget())
