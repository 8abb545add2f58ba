"""Deadlines follow from what was measured, and a minority cannot move them."""

import pytest

from darknight.fleet.deadlines import FACTOR, FIRST, LEAST, Deadlines


def test_what_was_never_measured_gets_long():
    assert Deadlines().due("a", asked=4, times=[]) == FIRST


def test_once_most_have_answered_the_rest_is_measured_by_them():
    assert Deadlines().due("a", asked=4, times=[2.0, 2.0, 2.0]) == FACTOR * 2.0
    assert Deadlines().due("a", asked=4, times=[0.001] * 3) == LEAST


def test_what_took_long_before_may_take_long_again():
    deadlines = Deadlines()
    deadlines.measured("a", [3.0] * 4)
    assert deadlines.due("a", asked=4, times=[0.5] * 3) == FACTOR * 3.0
    assert deadlines.due("b", asked=4, times=[0.5] * 3) == FACTOR * 0.5


def test_while_most_are_missing_nobody_in_particular_is_late():
    deadlines = Deadlines()
    deadlines.measured("a", [1.0] * 4)
    assert deadlines.due("a", asked=4, times=[0.5]) == 60.0


def test_a_stand_in_gets_no_more_than_the_usual():
    deadlines = Deadlines()
    deadlines.measured("a", [1.0] * 4)
    assert deadlines.due("a", asked=1, times=[]) == FACTOR


def test_one_slow_round_is_forgotten_slowly():
    deadlines = Deadlines()
    for seconds in (1.0, 10.0, *([1.0] * 60)):
        deadlines.measured("a", [seconds] * 4)
    assert deadlines.due("a", asked=1, times=[0.1]) == pytest.approx(FACTOR, rel=0.05)


def test_one_worker_that_always_answers_at_the_last_moment_moves_nothing():
    deadlines = Deadlines()
    for _ in range(50):
        honest = [0.3, 0.3, 0.3]
        due = deadlines.due("a", asked=4, times=honest)
        assert due == pytest.approx(FACTOR * 0.3)
        deadlines.measured("a", [*honest, 0.99 * due])


def test_one_answer_alone_proves_nothing():
    deadlines = Deadlines()
    deadlines.measured("a", [0.3] * 4)
    deadlines.measured("a", [500.0])
    assert deadlines.due("a", asked=1, times=[]) == FACTOR * 0.3


def test_no_wait_is_longer_than_the_first():
    deadlines = Deadlines()
    deadlines.measured("a", [10_000.0] * 4)
    assert deadlines.due("a", asked=4, times=[10_000.0] * 3) == FIRST
    assert deadlines.due("a", asked=4, times=[]) == FIRST


def test_a_number_of_ones_own_replaces_it_all():
    deadlines = Deadlines(patience=0.3)
    deadlines.measured("a", [100.0] * 4)
    assert deadlines.due("a", asked=4, times=[50.0] * 3) == 0.3


def test_one_worker_alone_is_late_after_a_multiple_of_the_usual_time():
    deadlines = Deadlines()
    assert deadlines.late_after("a") == 0.0
    deadlines.measured("a", [2.0, 2.0, 3.0])
    assert deadlines.late_after("a") == FACTOR * 2.0
    deadlines.measured("b", [1e9] * 3)
    assert deadlines.late_after("b") == FIRST
    assert Deadlines(7.0).late_after("a") == 7.0
