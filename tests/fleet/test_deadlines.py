"""Deadlines follow from what was measured, and a minority cannot move them."""

import pytest

from darknight.fleet.deadlines import FACTOR, FIRST, LEAST, STALL, Deadlines

FOUR = {0, 1, 2, 3}


def test_what_was_never_measured_gets_long():
    assert Deadlines().due("a", asked=FOUR, times=[]) == FIRST


def test_once_most_have_answered_the_rest_is_measured_by_them():
    assert Deadlines().due("a", asked=FOUR, times=[2.0, 2.0, 2.0]) == FACTOR * 2.0
    assert Deadlines().due("a", asked=FOUR, times=[0.001] * 3) == LEAST


def test_what_took_long_before_may_take_long_again():
    deadlines = Deadlines()
    deadlines.measured("a", [3.0] * 4, asked=FOUR)
    assert deadlines.due("a", asked=FOUR, times=[0.5] * 3) == FACTOR * 3.0
    assert deadlines.due("b", asked=FOUR, times=[0.5] * 3) == FACTOR * 0.5


def test_while_most_are_missing_nobody_in_particular_is_late():
    deadlines = Deadlines()
    deadlines.measured("a", [1.0] * 4, asked=FOUR)
    assert deadlines.due("a", asked=FOUR, times=[0.5]) == STALL


def test_a_stand_in_gets_no_more_than_the_usual():
    deadlines = Deadlines()
    deadlines.measured("a", [1.0] * 4, asked=FOUR)
    assert deadlines.due("a", asked={4}, times=[]) == FACTOR


def test_one_slow_round_is_forgotten_slowly():
    deadlines = Deadlines()
    for seconds in (1.0, 10.0, *([1.0] * 60)):
        deadlines.measured("a", [seconds] * 4, asked=FOUR)
    assert deadlines.due("a", asked={4}, times=[0.1]) == pytest.approx(FACTOR, rel=0.05)


def test_one_worker_that_always_answers_at_the_last_moment_moves_nothing():
    deadlines = Deadlines()
    for _ in range(50):
        honest = [0.3, 0.3, 0.3]
        due = deadlines.due("a", asked=FOUR, times=honest)
        assert due == pytest.approx(FACTOR * 0.3)
        deadlines.measured("a", [*honest, 0.99 * due], asked=FOUR)


def test_one_answer_alone_proves_nothing():
    deadlines = Deadlines()
    deadlines.measured("a", [0.3] * 4, asked=FOUR)
    deadlines.measured("a", [500.0], asked={4})
    assert deadlines.due("a", asked={4}, times=[]) == FACTOR * 0.3


def test_no_wait_is_longer_than_the_first():
    deadlines = Deadlines()
    deadlines.measured("a", [10_000.0] * 4, asked=FOUR)
    assert deadlines.due("a", asked=FOUR, times=[10_000.0] * 3) == FIRST
    assert deadlines.due("a", asked=FOUR, times=[]) == FIRST


def test_a_number_of_ones_own_replaces_it_all():
    deadlines = Deadlines(patience=0.3)
    deadlines.measured("a", [100.0] * 4, asked=FOUR)
    assert deadlines.due("a", asked=FOUR, times=[50.0] * 3) == 0.3


def test_one_worker_alone_is_late_after_a_multiple_of_the_usual_time():
    deadlines = Deadlines()
    assert deadlines.late_after("a") == 0.0
    deadlines.measured("a", [2.0, 2.0, 3.0], asked=FOUR)
    assert deadlines.late_after("a") == FACTOR * 2.0
    deadlines.measured("b", [1e9] * 3, asked=FOUR)
    assert deadlines.late_after("b") == FIRST
    assert Deadlines(7.0).late_after("a") == 7.0


# --- one or two alone -------------------------------------------------------------------------------------------------
def test_one_or_two_that_were_never_measured_get_a_minute():
    for alone in ({2}, {0, 3}):
        assert Deadlines().due("a", asked=alone, times=[]) == STALL < FIRST


def test_one_or_two_alone_are_measured_by_themselves():
    """So that one that hangs costs a multiple of the task, also where a scheme never asks three."""
    deadlines = Deadlines()
    deadlines.measured("a", [0.3], asked={2})
    deadlines.measured("a", [0.3, 0.4], asked={0, 3})
    assert deadlines.due("a", asked={2}, times=[]) == FACTOR * FACTOR * 0.3
    assert deadlines.due("a", asked={3, 0}, times=[]) == FACTOR * FACTOR * 0.4
    assert deadlines.due("a", asked={0, 3}, times=[0.2]) == LEAST
    deadlines.measured("a", [0.001], asked={2})
    assert deadlines.due("a", asked={2}, times=[]) == FACTOR * LEAST


def test_a_few_are_measured_only_if_all_have_answered():
    deadlines = Deadlines()
    deadlines.measured("a", [0.2], asked={0, 3})
    deadlines.measured("a", [], asked={0})
    deadlines.measured("a", [0.2, 0.2], asked=FOUR)
    for alone in ({0}, {0, 3}):
        assert deadlines.due("a", asked=alone, times=[]) == STALL


def test_one_alone_moves_no_deadline_of_others_and_its_own_only_down():
    deadlines = Deadlines()
    deadlines.measured("a", [0.3], asked={2})
    for _ in range(50):
        due = deadlines.due("a", asked={2}, times=[])
        assert due == FACTOR * FACTOR * 0.3
        deadlines.measured("a", [0.99 * due], asked={2})
    deadlines.measured("a", [0.0001], asked={2})  # it hurries, so that others seem late
    assert deadlines.due("a", asked={1}, times=[]) == STALL
    assert deadlines.due("a", asked={1, 2}, times=[]) == STALL
    assert deadlines.due("a", asked=FOUR, times=[]) == FIRST
    assert deadlines.due("b", asked={2}, times=[]) == STALL
    assert deadlines.late_after("a") == 0.0


def test_one_alone_that_was_slow_from_the_start_gets_no_more_than_a_minute():
    deadlines = Deadlines()
    deadlines.measured("a", [50.0], asked={2})
    assert deadlines.due("a", asked={2}, times=[]) == STALL


def test_what_three_have_shown_counts_more_than_what_one_shows():
    deadlines = Deadlines()
    deadlines.measured("a", [10.0], asked={2})
    deadlines.measured("a", [1.0] * 4, asked=FOUR)
    assert deadlines.due("a", asked={2}, times=[]) == FACTOR


def test_what_is_remembered_has_a_limit():
    deadlines = Deadlines()
    for number in range(5000):
        deadlines.measured(number, [1.0] * 4, asked=FOUR)
        deadlines.measured(number, [1.0], asked={2})
    assert len(deadlines._usual) == len(deadlines._alone) == 4096
    assert deadlines.due(0, asked={2}, times=[]) == STALL
    assert deadlines.due(4999, asked={2}, times=[]) == FACTOR
