"""What an impossible request is told would help does help."""

import pytest

from darknight.errors import PlanError
from darknight.plan import make_plan
from plan.requests import request


def refused(**changes):
    with pytest.raises(PlanError) as refusal:
        make_plan(request(**{"model": "small-cnn", "spares": 0, "max_inputs": None, **changes}))
    return refusal.value


CASES = {
    "too few workers": ({"operators": tuple("ab")}, {"operators"}),
    "too few for the colluders": ({"operators": tuple("abcd"), "colluders": 2}, {"operators", "colluders"}),
    "too few for the spares": ({"operators": tuple("abcd"), "spares": 2}, {"operators", "spares"}),
    "one operator": ({"operators": tuple("aaaaaa")}, {"operators"}),
    "too few operators": ({"operators": tuple("aabb")}, {"operators"}),
    "more colluders help": ({"operators": tuple("aabbccdd"), "spares": 2}, {"operators", "colluders", "spares"}),
    "inference": ({"operators": tuple("ab"), "training": False, "colluders": 2}, {"operators", "colluders"}),
    "target too low": (
        {"arithmetic": "real", "leakage_target": 1e-12},
        {"arithmetic", "leakage_target"},
    ),
    "target too low for so many epochs": (
        {"arithmetic": "real", "leakage_target": 1e-5, "epochs": 10**6},
        {"arithmetic", "leakage_target", "epochs"},
    ),
    "no noise leaks nothing": ({"arithmetic": "real", "leakage_target": 0.0}, {"arithmetic", "leakage_target"}),
    "unknown coefficients": (
        {"arithmetic": "real", "leakage_target": 1.0, "colluders": 4, "operators": tuple("abcdefghi")},
        {"arithmetic", "colluders"},
    ),
    "two obstacles": (
        {"arithmetic": "real", "leakage_target": 1e-12, "operators": tuple("ab")},
        {"arithmetic", "operators"},
    ),
}


def changed(before, after):
    return {name for name in vars(before) if getattr(before, name) != getattr(after, name)}


@pytest.mark.parametrize("case", CASES)
def test_every_remedy_is_enough_and_is_in_the_message(case):
    changes, kinds = CASES[case]
    asked = request(**{"model": "small-cnn", "spares": 0, "max_inputs": None, **changes})
    error = refused(**changes)
    assert error.remedies
    found = set()
    for remedy in error.remedies:
        assert remedy.words in str(error)
        plan = make_plan(remedy.request)  # the advice, taken
        assert plan.scheme.workers <= remedy.request.usable_workers
        if plan.request.leakage_target is not None:
            assert plan.run.nats <= plan.request.leakage_target
        found |= changed(asked, remedy.request)
    assert found == kinds


def test_no_smaller_change_of_the_kind_would_do():
    """One worker fewer than advised is not enough, one colluder more than advised neither, and so on."""
    (more, fewer) = refused(operators=tuple("abcd"), colluders=3).remedies
    assert (more.words, fewer.words) == ("3 more workers of operators of their own", "colluders=1")
    refused(operators=more.request.operators[:-1], colluders=3)
    refused(operators=tuple("abcd"), colluders=2)
    (_, spread) = refused(operators=tuple("aabbaabb"), colluders=1, spares=2).remedies[:2]
    assert spread.words == "the same 8 workers spread over 5 operators"
    refused(operators=tuple("abcdabcd"), spares=2)


def test_the_least_target_is_the_least():
    error = refused(arithmetic="real", leakage_target=1e-12)
    (target,) = [remedy.request.leakage_target for remedy in error.remedies if "target" in remedy.words]
    refused(arithmetic="real", leakage_target=0.95 * target)


def test_reasons():
    assert str(refused(operators=tuple("ab"))).startswith(
        "2 workers; training with colluders=1 and spares=0 needs 3 or more. It is possible with "
    )
    assert "6 workers, of which 1 can be used, at most 1 of one operator; " in str(refused(operators=("a",) * 6))
    assert "inference with colluders=2 and spares=0 needs 3" in str(
        refused(operators=tuple("ab"), training=False, colluders=2)
    )
    assert "no verified real coefficients" in str(
        refused(arithmetic="real", leakage_target=1.0, colluders=4, operators=tuple("abcdefghi"))
    )
