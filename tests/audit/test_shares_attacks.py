"""The attacks on shares: nothing from the default scheme, and the same attacks find what a broken one leaves."""

from dataclasses import replace

import pytest

from darknight.audit import Must, Scene
from darknight.audit.attacks import averaging, coalitions, one_share
from darknight.audit.broken import Fault, broken_shares
from darknight.data import Dataset, Tensors, read_dataset

pytestmark = pytest.mark.usefixtures("one_thread")

ATTACKS = [one_share.ATTACK, averaging.ATTACK, coalitions.ATTACK]


def small_set() -> Dataset:
    digits = read_dataset("digits", seed=0)
    train = Tensors(digits.train_x[:320], digits.train_y[:320])
    return Dataset(name="digits", train=train, test=digits.test, classes=10)


class BrokenScene(Scene):
    """A scene whose recorded workers received shares without noise, as if the product had forgotten it."""

    def recording(self, scheme, *arguments, **settings):
        return without_noise(super().recording(scheme, *arguments, **settings))


def without_noise(recording):
    steps = []
    for number, step in enumerate(recording.steps):
        shares = broken_shares(step.images, recording.scheme, Fault.NO_NOISE, seed=number)
        views = tuple(
            tuple(
                replace(record, tensor=shares[worker].view_as(record.tensor))
                if (record.layer, record.kind) == (recording.layers[0], "forward.share")
                else record
                for record in view
            )
            for worker, view in enumerate(step.views)
        )
        steps.append(replace(step, views=views))
    return replace(recording, steps=tuple(steps))


@pytest.fixture(scope="module")
def scene():
    return Scene(small_set(), quick=True)


@pytest.fixture(scope="module")
def broken_scene(scene):
    broken = BrokenScene(small_set(), quick=True)
    broken._recordings = scene._recordings  # the same trainings, so that they are recorded once
    return broken


@pytest.fixture(scope="module")
def found(scene):
    return {attack.key: attack.run(scene) for attack in ATTACKS}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.key)
def test_all_is_as_it_must(found, attack):
    findings = found[attack.key]
    for finding in findings:
        assert finding.as_it_must, finding
        assert finding.control is (finding.must is Must.SUCCEED)
        assert all(picture.png.startswith(b"\x89PNG") and picture.caption for picture in finding.pictures)
    assert {finding.must for finding in findings} == {Must.FAIL, Must.SUCCEED}
    assert any(finding.pictures for finding in findings)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.key)
def test_a_scheme_that_forgets_its_noise_is_found_out(found, broken_scene, attack):
    """Every attack notices on its own."""
    surprises = [finding for finding in attack.run(broken_scene) if not finding.as_it_must]
    assert surprises
    assert all(finding.must is Must.FAIL and finding.succeeded for finding in surprises)


def test_the_network_reaches_the_likeness_that_a_control_must_have(found):
    control = next(each for each in found["one-share"] if each.control and "SSIM" in each.measure)
    assert control.low > 0.5
    target = next(each for each in found["one-share"] if not each.control and "SSIM" in each.measure)
    assert abs(target.value - target.guessing) < 0.02


def test_one_worker_too_many_has_every_pixel(found):
    exact = next(each for each in found["coalitions"] if "exactly" in each.measure)
    assert exact.value == 1


@pytest.mark.full
def test_two_colluders_learn_nothing_and_a_third_makes_the_difference():
    """The whole suite looks at a scheme for two as well."""
    scene = Scene(read_dataset("digits", seed=0), quick=False)
    findings = [each for each in coalitions.ATTACK.run(scene) if "two colluders" in each.target]
    assert [(each.must, each.as_it_must) for each in findings] == [(Must.FAIL, True), (Must.SUCCEED, True)]
