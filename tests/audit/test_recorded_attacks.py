"""Attacks on recorded trainings: each succeeds on its control and fails on the default scheme."""

import pytest
import torch

from darknight.audit import Must, Scene, default_scheme
from darknight.audit.attacks import gradient_inversion, gradients_in_the_clear, one_hand, predicted_masks
from darknight.audit.broken import quantised
from darknight.audit.finding import Outcome
from darknight.audit.seen_gradients import seen_gradients
from darknight.coding import Scheme, draw_code, field, virtual_batches
from darknight.data import read_dataset
from darknight.randomness import Randomness

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def scene():
    small = Scene(read_dataset("digits", seed=0), quick=True, seed=0)
    small.images, small.labels, small.epochs = small.images[:384], small.labels[:384], 1
    return small


@pytest.mark.parametrize(
    ("attack", "succeed", "fail"),
    [(gradients_in_the_clear, 2, 3), (one_hand, 3, 1), (predicted_masks, 1, 1)],
    ids=lambda value: getattr(value, "__name__", "").rpartition(".")[2],
)
def test_controls_succeed_and_the_default_scheme_holds(scene, attack, succeed, fail):
    findings = attack.ATTACK.run(scene)
    assert [finding.must for finding in findings].count(Must.SUCCEED) == succeed
    assert [finding.must for finding in findings].count(Must.FAIL) == fail
    for finding in findings:
        wanted = Outcome.SUCCEEDED if finding.control else Outcome.FAILED
        assert finding.outcome is wanted, f"{finding.target}: {finding.value} in {finding.low} .. {finding.high}"
        assert all(picture.png.startswith(b"\x89PNG") for picture in finding.pictures)
    assert any(finding.pictures for finding in findings if finding.control)


def test_gradients_in_the_clear_are_exact_and_masked_ones_are_not(scene):
    paper, ours = scene.recording(Scheme.paper()), scene.recording(default_scheme())
    clear = seen_gradients(paper, paper.steps[0], paper.layers[-1])
    assert clear.shape == (96, 10)
    assert torch.equal(clear.argmin(dim=1), paper.steps[0].labels)
    assert float(clear.sum(dim=1).abs().max()) < 1e-6  # softmax and one-hot both add up to one
    masked = seen_gradients(ours, ours.steps[0], ours.layers[-1])
    assert masked.shape == (96, 10)
    assert int(masked.abs().max()) > ours.prime // 4


def test_the_attack_on_updates_uses_the_weights_that_workers_are_sent(scene):
    recording = scene.recording(default_scheme())
    layer = recording.layers[-1]
    for step in recording.steps[:2]:
        on_the_wire = step.seen(0, layer, "weights").to(torch.float32)
        assumed = gradient_inversion.sent(step.before[f"{layer}.weight"], bits=default_scheme().arithmetic.bits)
        assert torch.equal(on_the_wire / on_the_wire.abs().max(), assumed / assumed.abs().max())


def test_small_batches_are_inverted_and_the_size_of_a_batch_matters(scene, monkeypatch):
    monkeypatch.setattr(gradient_inversion, "_SIZES", {True: (1, 32)})
    monkeypatch.setattr(gradient_inversion, "_STEPS", {True: 150})
    single, many = gradient_inversion.ATTACK.run(scene)
    assert {single.must, many.must} == {Must.SHOW}
    assert single.low > 0.95
    assert many.high < single.low
    assert many.guessing > single.guessing
    assert len(single.pictures) == 2


@pytest.mark.parametrize("inputs", [2, 4])
def test_secret_coefficients_do_not_hide_images_from_who_has_all_shares(scene, inputs):
    scheme, randomness = Scheme(inputs=inputs, colluders=1, mixing="dense"), Randomness.from_operating_system()
    images, known = scene.images[:96], scene.images[96:]
    groups = virtual_batches(quantised(images, scheme.arithmetic), inputs)
    code, prime = draw_code(scheme, randomness.fresh()), scheme.arithmetic.prime
    shares = field.encode(code.A, groups, prime, randomness.fresh()).flatten(2)
    truth = groups.transpose(0, 1).flatten(1).double()
    found = one_hand.unmixed_field(shares, prime, known, inputs, seed=0).flatten(1)
    table = torch.corrcoef(torch.cat([found, truth]))[:inputs, inputs:].abs()
    assert float(table.amax(dim=0).min()) > 0.99999
    alone = one_hand.unmixed_field(shares[:1], prime, known, 1, seed=0).flatten(1)
    assert float(torch.corrcoef(torch.cat([alone, truth]))[0, 1:].abs().max()) < 0.2


def test_images_are_turned_upright_and_scaled(scene):
    rows = scene.images[:64].reshape(2, 32, 64)
    turned = one_hand.upright(torch.stack([-3 * rows[0], 0.5 * rows[1]]), scene.images)
    assert torch.allclose(turned, rows.double(), atol=1e-5)
