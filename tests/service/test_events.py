"""Events of a job that lasts for days: what is new is told, whatever came before."""

import threading

import pytest

from darknight.service import events
from darknight.service.events import Events


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(events, "_MOST", 50)


def numbers(found):
    return [words["event"] for words in found]


def test_everything_is_told_in_its_order():
    told = Events()
    for step in range(7):
        told.add("step", step=step)
    told.close()
    assert numbers(told.after(0, lambda: False)) == [1, 2, 3, 4, 5, 6, 7]
    assert [words["step"] for words in told.after(4, lambda: False)] == [4, 5, 6]
    assert numbers(told.after(7, lambda: False)) == []
    assert numbers(told.after(99, lambda: False)) == []


def test_a_receipt_is_never_lost_in_a_long_training(few):
    """With a step twice a second, the limit of a list that only grows would be reached within a day."""
    told = Events()
    for step in range(1000):
        told.add("step", step=step)
    told.add("checkpoint", receipt={"number": 9})
    told.add("state", state="finished")
    told.close()
    found = list(told.after(0, lambda: False))
    assert [words["kind"] for words in found[-2:]] == ["checkpoint", "state"]
    assert numbers(found) == list(range(1003 - len(found), 1003))
    assert 40 <= len(found) <= 50


def test_who_watches_all_the_time_sees_each_once(few):
    told, seen = Events(), []
    watching = threading.Thread(target=lambda: seen.extend(told.after(0, lambda: False)))
    watching.start()
    for step in range(400):
        told.add("step", step=step)
        while len(seen) < step - 20:
            pass
    told.close()
    watching.join(30)
    assert numbers(seen) == list(range(1, 401))
