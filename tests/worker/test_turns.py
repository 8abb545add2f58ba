"""Turns are given in the order in which they were asked for."""

import threading
import time

from darknight.worker.turns import Turns


def wait_until(true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.001)


def test_a_busy_user_cannot_take_turn_after_turn_while_another_waits():
    """With a plain lock the busy thread would go on: it takes the lock again before the other has woken up."""
    turns, served, stop = Turns(), [], threading.Event()

    def busy():
        while not stop.is_set():
            with turns:
                served.append("busy")
                time.sleep(0.001)

    thread = threading.Thread(target=busy)
    thread.start()
    wait_until(lambda: len(served) > 3)
    waits = []
    for _ in range(20):
        before = len(served)
        with turns:
            waits.append(len(served) - before)
            served.append("single")
    stop.set()
    thread.join()
    assert max(waits) <= 2  # the turn that was going on, and at most one that was asked for before


def test_turns_come_in_the_order_of_asking_and_one_at_a_time():
    turns, order, inside = Turns(), [], []

    def ask(number):
        with turns:
            inside.append(number)
            assert len(inside) == 1
            order.append(number)
            inside.remove(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda number=number: turns.waiting == number + 1)
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_a_turn_ends_with_an_error_too():
    turns = Turns()
    try:
        with turns:
            raise RuntimeError
    except RuntimeError:
        pass
    with turns:
        pass
