"""Deadlines follow from what was measured."""

import pytest

from darknight.fleet.deadlines import FACTOR, FIRST, LEAST, Deadlines


def test_what_was_never_measured_gets_long():
    assert Deadlines().due("a", asked=4, answered=0, last=0.0) == FIRST


def test_once_most_have_answered_the_rest_is_measured_by_them():
    due = Deadlines().due("a", asked=4, answered=3, last=2.0)
    assert due == FACTOR * 2.0
    assert Deadlines().due("a", asked=4, answered=3, last=0.001) == LEAST


def test_what_took_long_before_may_take_long_again():
    deadlines = Deadlines()
    deadlines.measured("a", 3.0)
    assert deadlines.due("a", asked=4, answered=3, last=0.5) == FACTOR * 3.0
    assert deadlines.due("b", asked=4, answered=3, last=0.5) == FACTOR * 0.5


def test_while_most_are_missing_nobody_in_particular_is_late():
    deadlines = Deadlines()
    deadlines.measured("a", 1.0)
    assert deadlines.due("a", asked=4, answered=1, last=0.5) == 60.0


def test_one_slow_answer_is_forgotten_slowly():
    deadlines = Deadlines()
    for seconds in (1.0, 10.0, *([1.0] * 60)):
        deadlines.measured("a", seconds)
    assert deadlines.due("a", asked=1, answered=1, last=0.1) == pytest.approx(FACTOR, rel=0.05)


def test_a_number_of_ones_own_replaces_it_all():
    deadlines = Deadlines(patience=0.3)
    deadlines.measured("a", 100.0)
    assert deadlines.due("a", asked=4, answered=3, last=50.0) == 0.3
