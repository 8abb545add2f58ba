"""The fleet itself: who may use it, what it believes, how it ends. Its workers are threads here."""

import gc
import threading
import time

import pytest
import torch

import darknight as dk
from darknight.errors import FleetError, WorkerError
from darknight.fleet import Fleet, Member
from darknight.fleet.member import Line
from darknight.types import Answer, Expected, Forget, ForwardTask
from darknight.wire import LinkClosed, Misbehaved, in_process
from fleet.threads import thread_fleet, thread_member
from fleet.workers import eventually

SCHEME = dk.Scheme(inputs=2, colluders=1)


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("darknight-worker")]


def gone(count):
    """Whether only `count` workers are left, soon."""
    deadline = time.monotonic() + 10
    while len(workers()) > count and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(workers()) == count


def unreachable(reason="nothing listens there", error=LinkClosed):
    def dial():
        raise error(reason)

    return Member("far", "somebody", dial)


def test_closing_a_fleet_ends_its_links_and_a_second_time_does_nothing():
    before = len(workers())
    with thread_fleet(SCHEME) as fleet:
        assert fleet.workers == SCHEME.workers == len(workers()) - before
        assert len(set(fleet.operators)) == fleet.workers
    assert gone(before)
    fleet.close()


def test_a_fleet_that_is_dropped_takes_its_workers_with_it():
    before = len(workers())
    fleet = thread_fleet(SCHEME)
    assert len(workers()) == before + 4
    del fleet
    gc.collect()
    assert gone(before)


def test_a_fleet_without_transcripts_says_how_to_get_them():
    with thread_fleet(SCHEME) as fleet, pytest.raises(dk.errors.FleetError, match="record=True"):
        fleet.transcript(0)


@pytest.mark.parametrize("number", [-1, 4])
def test_a_worker_that_is_not_there_has_no_transcript(number):
    with thread_fleet(SCHEME, record=True) as fleet, pytest.raises(dk.errors.FleetError, match="workers 0 to 3"):
        fleet.transcript(number)


@pytest.mark.parametrize("patience", [0, -1, float("nan"), float("inf"), "long"])
def test_patience_is_a_number_of_seconds(patience):
    with pytest.raises(dk.errors.UsageError, match="patience"):
        thread_fleet(SCHEME, patience=patience)


# --- who can be reached -----------------------------------------------------------------------------------------------
def test_if_nobody_can_be_reached_each_reason_is_listed():
    with pytest.raises(dk.errors.FleetError, match=r"no worker can be used\. far: nothing listens there; far: asleep"):
        Fleet([unreachable(), unreachable("asleep")])
    with pytest.raises(dk.errors.FleetError, match="empty"):
        Fleet([])


def test_if_some_can_be_reached_the_others_may_come_later():
    there = threading.Event()
    late = thread_member(1)

    def dial():
        if not there.is_set():
            raise LinkClosed("nothing listens there")
        return late.dial()

    with Fleet([thread_member(0), Member("late", "b", dial)]) as fleet:
        assert [fleet.ready(worker) for worker in (0, 1)] == [True, False]
        assert fleet.trouble(1) == "nothing listens there"
        assert "1 of them ready" in repr(fleet)
        there.set()
        deadline = time.monotonic() + 10
        while not fleet.ready(1) and time.monotonic() < deadline:  # the fleet dials again by itself
            time.sleep(0.01)
        assert fleet.ready(1)


def test_one_that_breaks_the_handshake_is_not_dialled_again():
    with Fleet([thread_member(0), unreachable("speaks another protocol", Misbehaved)]) as fleet:
        assert "broke the protocol: speaks another protocol" in fleet.trouble(1)
        assert not fleet._lines[1].broken


# --- whose it is ------------------------------------------------------------------------------------------------------
def test_a_fleet_works_for_one_runtime_at_a_time():
    """Two would give their calls and layers the same names."""
    with thread_fleet(SCHEME) as fleet:
        with dk.Runtime(SCHEME, fleet), pytest.raises(dk.errors.FleetError, match="another runtime"):
            dk.Runtime(SCHEME, fleet)
        with dk.Runtime(SCHEME, fleet):
            pass  # the first is closed


def test_workers_forget_everything_when_the_runtime_is_closed():
    seats = []

    def dial():
        link, seat = in_process()
        seats.append(seat)
        return link

    fleet = Fleet([Member(f"w{j}", f"o{j}", dial) for j in range(4)])
    with fleet:
        dk.Runtime(SCHEME, fleet).close()
        for seat in seats:  # once when it began, once when it ended
            assert [seat.read()[1] for _ in range(2)] == [Forget(everything=True)] * 2


def test_closing_waits_for_a_call_of_another_thread():
    """Otherwise the next runtime on this fleet would get, and lose, what the first one's call still sends."""
    with thread_fleet(SCHEME) as fleet:
        runtime = dk.Runtime(SCHEME, fleet)
        model = torch.nn.Linear(3, 2)
        dk.protect_(model, runtime)
        gather, waiting, go, found = fleet.gather, threading.Event(), threading.Event(), []

        def slow(*arguments, **named):
            waiting.set()
            go.wait(10)
            return gather(*arguments, **named)

        fleet.gather = slow
        caller = threading.Thread(target=lambda: found.append(model(torch.ones(4, 3))))
        caller.start()
        waiting.wait(10)
        closer = threading.Thread(target=runtime.close)
        closer.start()
        closer.join(0.1)
        assert closer.is_alive()
        go.set()
        caller.join(10)
        closer.join(10)
        assert found[0].shape == (4, 2)
        with dk.Runtime(SCHEME, fleet):
            pass


def test_a_fleet_that_is_closed_while_a_call_waits_ends_the_call():
    seats = []

    def dial():
        link, seat = in_process()
        seats.append(seat)
        return link

    model, found = torch.nn.Linear(3, 2), []
    fleet = Fleet([Member(f"w{j}", f"o{j}", dial) for j in range(4)])

    def call():
        try:
            model(torch.ones(4, 3))
        except dk.errors.FleetError as error:
            found.append(error)

    runtime = dk.Runtime(SCHEME, fleet)
    dk.protect_(model, runtime)
    caller = threading.Thread(target=call)
    caller.start()
    while type(seats[0].read()[1]) is Forget:  # until the task arrives
        pass
    fleet.close()
    caller.join(10)
    assert "the fleet is closed" in str(found[0])


# --- housekeeping -----------------------------------------------------------------------------------------------------
class Untidy:
    """A runtime that fails at first."""

    def __init__(self):
        self.asked = []

    def tidy(self):
        self.asked.append(threading.current_thread())
        if len(self.asked) < 4:
            raise RuntimeError("can't start new thread")


def test_housekeeping_survives_what_fails_in_it_and_says_so_once(caplog):
    owner = Untidy()
    with thread_fleet(SCHEME) as fleet:
        fleet.attach(owner)
        assert eventually(lambda: len(owner.asked) >= 6)
        fleet.detach(owner)
    assert len(set(owner.asked)) == 1
    assert caplog.text.count("housekeeping failed with RuntimeError") == 1
    assert "can't start" not in caplog.text  # whatever an exception says stays here


def test_a_worker_that_cannot_be_dialled_for_want_of_threads_is_dialled_later(monkeypatch):
    owner, member, short = Untidy(), thread_member(1), [True, True]
    owner.asked = [None] * 4
    with Fleet([thread_member(0), member]) as fleet:
        fleet.attach(owner)
        dial = Line.dial_in_background

        def none_left(line):
            if line.number == 0 and short:
                short.pop()
                raise RuntimeError("can't start new thread")
            dial(line)

        monkeypatch.setattr(Line, "dial_in_background", none_left)
        fleet._lines[1].close()
        assert eventually(lambda: not short and fleet.ready(1))
        assert len(owner.asked) > 4  # the owner was asked to tidy up all the while


# --- deadlines --------------------------------------------------------------------------------------------------------
def test_one_worker_that_is_asked_alone_and_hangs_costs_a_multiple_of_the_task():
    """A scheme with one input and one colluder never asks three, and must not wait for minutes each time."""
    seats = []

    def dial():
        link, seat = in_process()
        seats.append(seat)
        return link

    task = ForwardTask(layer="a", call=1, version=1, tensor=torch.zeros(1, 2), compute=False, keep=False)
    nothing = Expected({}, torch.int32, None)
    with Fleet([Member("alone", "a", dial)]) as fleet:
        asked = fleet.ask(0, task, nothing)
        ticket, _ = seats[0].read()
        seats[0].write(ticket, Answer(layer="a", call=1, tensors={}, seconds=0.0))
        assert fleet.gather({0: asked}, {0: nothing}, key="a").answers.keys() == {0}
        begun = time.monotonic()
        outcome = fleet.gather({0: fleet.ask(0, task, nothing)}, {0: nothing}, key="a")
        assert "did not answer in time" in str(outcome.lost[0])
        assert time.monotonic() - begun < 40  # 5 s; without a measurement a minute


# --- quarantine -------------------------------------------------------------------------------------------------------
def test_a_worker_that_is_put_out_gets_nothing_more_and_can_come_back():
    task = ForwardTask(layer="a", call=1, version=1, tensor=torch.zeros(1, 2), compute=False, keep=False)
    nothing = Expected({}, torch.int32, None)
    with thread_fleet(SCHEME) as fleet:
        before = len(workers())
        fleet.expel(1, "it lied")
        assert fleet.quarantined == {1: "it lied"}
        assert not fleet.ready(1)
        assert fleet.trouble(1) == "it lied"
        assert gone(before - 1)  # its link is closed
        with pytest.raises(WorkerError, match="it lied"):
            fleet.ask(1, task, nothing)
        fleet.expel(1, "something else")
        assert fleet.quarantined == {1: "it lied"}
        fleet.readmit(1)
        assert not fleet.quarantined
        assert fleet.ready(1)
        fleet.readmit(1)  # nothing to do
        fleet.expel(0, "")
        assert 0 in fleet.quarantined
        for number in (-1, fleet.workers):
            with pytest.raises(FleetError, match=f"no worker {number}"):
                fleet.expel(number, "nobody")
            with pytest.raises(FleetError, match=f"no worker {number}"):
                fleet.readmit(number)


def test_an_answer_after_one_that_is_late_is_not_waited_for():
    """It cannot come first. Who waited for each would lose the deadline as often as tasks are under way."""
    task = ForwardTask(layer="a", call=1, version=1, tensor=torch.zeros(1), compute=False, keep=True)
    nothing = Expected({}, torch.int32, None)
    with Fleet([Member("mute", "a", lambda: in_process()[0])]) as fleet:
        first, second = (fleet.ask(0, task, nothing) for _ in range(2))
        begun = time.monotonic()
        assert set(fleet.gather({0: first}, {0: nothing}, within=0.1).lost) == {0}
        assert set(fleet.gather({0: second}, {0: nothing}, within=120.0).lost) == {0}
        assert time.monotonic() - begun < 60.0
        assert not fleet.ready(0)
