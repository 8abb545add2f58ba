"""One worker through its failures, by a clock of the test: how long it rests after a delay, and how it is forgiven."""

from concurrent.futures import Future

import pytest

from darknight.fleet import Member
from darknight.fleet.member import Line
from darknight.wire import in_process


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def line(clock):
    line = Line(0, Member("w0", "acme", lambda: in_process()[0]), clock)
    line.dial(now=True)
    yield line
    line.end()


def rest_after(line, clock, cost, answers=1.0):
    """Seconds of rest of a worker that was late, if it answers so long after its deadline."""
    assert line.ready
    owed = Future()
    line.late(owed, cost)
    clock.now += answers
    assert not line.ready
    owed.set_result(None)
    rest = line._ready_at - clock.now
    clock.now += 0.99 * rest
    assert not line.ready
    clock.now += 0.02 * rest
    assert line.ready
    return rest


def test_a_worker_that_was_late_once_rests_as_long_as_others_waited(line, clock):
    assert rest_after(line, clock, 3.0) == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize("cost", [0.05, 1.0, 10.0, 60.0])
def test_one_that_is_late_again_rests_longer_up_to_twenty_times_the_cost(line, clock, cost):
    rests = [rest_after(line, clock, cost) for _ in range(12)]
    doubled = [min(max(0.1, cost) * 2**count, max(30.0, 20 * cost)) for count in range(12)]
    assert rests == pytest.approx(doubled, abs=0.01)


def test_nobody_rests_longer_than_an_hour(line, clock):
    assert max(rest_after(line, clock, 600.0) for _ in range(5)) == pytest.approx(3600.0, abs=0.01)


def test_who_was_in_time_for_long_enough_is_forgiven(line, clock):
    rest_after(line, clock, 2.0)
    clock.now += 35.0
    assert rest_after(line, clock, 2.0) == pytest.approx(4.0, abs=0.01)
    clock.now += 41.0
    assert rest_after(line, clock, 2.0) == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("cost", [0.2, 1.0, 5.0, 150.0])
@pytest.mark.parametrize("between", [0.0, 0.5, 19.0, 21.0])  # times the cost, or half a minute: when it is late again
def test_however_it_times_its_delays_it_costs_a_twentieth(line, clock, cost, between):
    begun, delays = clock.now, 200
    for _ in range(delays):
        clock.now += cost  # others wait
        rest_after(line, clock, cost, answers=0.0)
        clock.now += between * max(cost, 1.5)
    assert delays * cost < 0.055 * (clock.now - begun)


def test_a_link_that_is_closed_shortens_no_rest(line, clock):
    owed = Future()
    line.late(owed, 8.0)
    line._link.close()
    owed.set_exception(line._link.failure)
    line.dial(now=True)
    clock.now += 7.0
    assert not line.ready
    assert line.trouble == "it did not answer in time"
    clock.now += 1.5
    assert line.ready


def test_one_that_is_started_again_on_purpose_works_at_once(line, clock):
    owed = Future()
    line.late(owed, 8.0)
    line.expect()
    line._link.close()
    owed.set_exception(line._link.failure)
    line.dial(now=True)
    assert line.ready
