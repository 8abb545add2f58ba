"""What counts as success, as failure, and as neither."""

import math

import pytest

from audit.scenes import broken, finding
from darknight.audit import Must, Outcome
from darknight.audit.suite import verdict


@pytest.mark.parametrize(
    ("low", "value", "high", "outcome"),
    [
        (-0.1, 0.0, 0.1, Outcome.FAILED),
        (0.1, 0.15, 0.2, Outcome.FAILED),
        (0.1, 0.2, 0.3, Outcome.UNDECIDED),
        (0.2, 0.3, 0.4, Outcome.UNDECIDED),
        (0.21, 0.3, 0.4, Outcome.SUCCEEDED),
    ],
)
def test_the_whole_interval_decides(low, value, high, outcome):
    found = {must: finding(low=low, value=value, high=high, must=must) for must in Must}
    assert {each.outcome for each in found.values()} == {outcome}
    assert found[Must.FAIL].as_it_must is (outcome is Outcome.FAILED)
    assert found[Must.SUCCEED].as_it_must is found[Must.SUCCEED].succeeded is (outcome is Outcome.SUCCEEDED)
    assert found[Must.SHOW].as_it_must


def test_what_cannot_be_told_from_guessing_says_so():
    assert finding().guessing_inside
    assert not broken().guessing_inside


@pytest.mark.parametrize(
    "numbers",
    [
        {"value": math.nan},
        {"high": math.inf},
        {"low": -math.inf},
        {"threshold": math.nan},
        {"value": 0.1},
        {"value": -0.1},
        {"guessing": 0.3},
    ],
)
def test_numbers_that_would_decide_wrongly_are_refused(numbers):
    """Not a number is never above a threshold: an attack that broke down would pass for one that failed."""
    with pytest.raises(ValueError, match="the default scheme"):
        finding(**numbers)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (finding(), "failed, as it must"),
        (finding(low=0.5, value=0.6, high=0.7), "succeeded, and must fail"),
        (finding(high=0.5), "undecided, and must fail"),
        (broken(), "succeeded, as it must"),
        (broken(low=0.0, value=0.1, high=0.1), "failed, and must succeed"),
        (finding(must=Must.SHOW), "shown"),
    ],
)
def test_verdicts_in_words(found, words):
    assert verdict(found) == words
