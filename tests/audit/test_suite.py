"""The suite as a whole: what it runs, what it adds up, and what it says."""

import json

import pytest

from audit.scenes import attack, broken, digits_scene, finding
from darknight.audit import Must, Scene, run_audit
from darknight.audit.attacks import ATTACKS
from darknight.data import read_dataset


@pytest.fixture(scope="module")
def scene():
    return digits_scene(seed=3)


def test_attacks_run_in_their_order_and_everything_is_in_the_summary(scene):
    started = []
    probes = [attack(finding(), broken(), key="first"), attack(finding(must=Must.SHOW, high=0.9), key="second")]
    audit = run_audit(scene, probes, started=lambda each: started.append(each.key))
    assert started == ["first", "second"]
    assert audit.passed
    assert not audit.surprises
    summary = json.loads(json.dumps(audit.summary()))
    assert summary["passed"] is True
    assert summary["settings"] == {
        "data": "digits",
        "examples": 480,
        "shape": [1, 8, 8],
        "model": "small-cnn",
        "quick": True,
        "seed": 3,
    }
    assert [each["key"] for each in summary["attacks"]] == ["first", "second"]
    first, control = summary["attacks"][0]["findings"]
    assert (first["outcome"], first["must"], first["as_it_must"]) == ("failed", "must fail", True)
    assert (control["outcome"], control["control"], control["high"]) == ("succeeded", True, 1)
    assert (first["guessing_inside"], control["guessing_inside"]) == (True, False)
    assert "pictures" not in first


@pytest.mark.parametrize(
    "surprise",
    [
        finding(target="a scheme that leaks", low=0.5, value=0.6, high=0.7),
        finding(target="nobody knows", high=0.5),
        broken(target="a blunt attack", low=0.0, value=0.01, high=0.1),
    ],
    ids=lambda surprise: surprise.target,
)
def test_one_surprise_is_enough(scene, surprise):
    audit = run_audit(scene, [attack(finding(), broken()), attack(finding(), surprise, key="other")])
    assert not audit.passed
    ((where, what),) = audit.surprises
    assert (where.key, what) == ("other", surprise)
    assert [each.as_it_must for each in audit.attacks] == [True, False]


def test_an_attack_without_findings_is_a_mistake(scene):
    with pytest.raises(ValueError, match="probe"):
        run_audit(scene, [attack()])


def test_every_attack_of_the_design_is_there_and_says_what_it_is():
    assert [each.key for each in ATTACKS] == [
        "one-share",
        "averaging",
        "coalitions",
        "gradients-in-the-clear",
        "gradient-inversion",
        "one-hand",
        "predicted-masks",
        "holes",
    ]
    for each in ATTACKS:
        assert each.title
        assert each.question.endswith("?")
        assert each.how.endswith(".")
        assert each.what_to_do.endswith(".")


@pytest.mark.full
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "whole"])
def test_the_whole_audit_passes(quick):
    """On digits every attack that must fail does, and every control succeeds."""
    audit = run_audit(Scene(read_dataset("digits", seed=0), quick=quick), ATTACKS)
    assert audit.passed, [f"{where.key}, {what.target}: {what}" for where, what in audit.surprises]
    for each in audit.attacks:
        musts = {found.must for found in each.findings}
        assert Must.FAIL not in musts or Must.SUCCEED in musts, f"{each.attack.key}: no control"
        assert any(found.pictures for found in each.findings), f"{each.attack.key}: no picture"
