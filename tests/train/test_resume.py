"""A training that was stopped after any step and resumed gives the weights of one that was not, bit for bit."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.data import Augmentation, Dataset, Tensors
from darknight.errors import DarKnightError, UsageError
from darknight.train import Store, fit, read_checkpoint, read_model
from fleet.threads import thread_fleet
from ops.test_place import NOTHING
from train.saved import SCHEME, StopAfter, network, protected, runtime_for, same, train, weights
from train.test_interrupt import interrupt
from train.test_loop import Scripted, recipe, toy

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES = {
    "sgd": recipe(schedule="cosine", weight_decay=0.01, augment=Augmentation(crop_padding=1)),
    "adamw": recipe(optimizer="adamw", learning_rate=0.01, schedule="one-cycle", clip=0.5, label_smoothing=0.1),
}


def run(where, folder, how, *, resume=False, stop_after=None):
    """Train for as long as allowed. The weights, the optimizer's memory in the last checkpoint, and the history."""
    fleet = thread_fleet(SCHEME) if where == "threads" else nullcontext()
    with fleet as hands, runtime_for(where, hands) as runtime:
        model = protected(network(), runtime)
        stops = [StopAfter(stop_after, interrupt)]
        history = None
        if stop_after is None:
            history = train(folder, model, how, resume=resume, runtime=runtime)
        else:
            with pytest.raises(KeyboardInterrupt, match=f"after step {stop_after} of 8"):
                train(folder, model, how, resume=resume, runtime=runtime, progress=stops)
        return weights(model), history


def outcome(folder):
    with Store(folder) as store:
        checkpoint = store.latest()
    return checkpoint, [(epoch.number, epoch.loss, epoch.accuracy) for epoch in checkpoint.epochs]


@pytest.mark.parametrize("label", RECIPES)
@pytest.mark.parametrize("where", ["clear", "alone", "threads"])
def test_stopped_by_ctrl_c_and_resumed(where, label, tmp_path, full):
    how = RECIPES[label]
    expected, _ = run(where, tmp_path / "whole", how)
    wanted, epochs = outcome(tmp_path / "whole")
    # In the first epoch, at its end before the evaluation, in the second one, at the very end.
    for stop in range(1, 9) if full else (2, 4, 7) if where != "threads" else (5,):
        folder = tmp_path / f"stopped-{stop}"
        partial, history = run(where, folder, how, stop_after=stop)
        assert history is None
        assert not same(partial, expected) or stop == 8
        assert outcome(folder)[0].step == stop
        found, history = run(where, folder, how, resume=True)
        assert same(found, expected), stop
        checkpoint, again = outcome(folder)
        assert again == epochs
        assert checkpoint.finished
        assert same(checkpoint.optimizer, wanted.optimizer)
        if wanted.runtime is not None:
            assert {**checkpoint.runtime, "run": ""} == {**wanted.runtime, "run": ""}
        assert checkpoint.best == wanted.best
        assert len(history.epochs) == 2


def test_alone_and_on_workers_the_weights_are_the_same(tmp_path):
    one, _ = run("alone", tmp_path / "alone", RECIPES["sgd"])
    run("threads", tmp_path / "moved", RECIPES["sgd"], stop_after=3)
    other, _ = run("alone", tmp_path / "moved", RECIPES["sgd"], resume=True)
    assert same(one, other)


def test_without_the_runtimes_state_it_would_differ(tmp_path):
    """The test above can fail: the rounding of gradients depends on how many there were."""
    expected, _ = run("alone", tmp_path / "whole", RECIPES["sgd"])
    run("alone", tmp_path / "stopped", RECIPES["sgd"], stop_after=3)
    checkpoint, _ = outcome(tmp_path / "stopped")
    with runtime_for("alone") as runtime:
        model = protected(network(), runtime)
        for layer in checkpoint.runtime["layers"].values():
            layer["gradients"] = 0
        fit(model, toy(), RECIPES["sgd"], runtime=runtime, resume=checkpoint)
        assert not same(weights(model), expected)


@pytest.mark.parametrize("where", ["alone", "threads"])
def test_a_step_that_failed_does_not_shift_what_follows(where, tmp_path):
    """A second Ctrl-C in a backward pass, after some layers have drawn their rounding."""
    expected, _ = run(where, tmp_path / "whole", RECIPES["sgd"])
    fleet = thread_fleet(SCHEME) if where == "threads" else nullcontext()
    with fleet as hands, runtime_for(where, hands) as runtime:
        model = protected(network(), runtime)
        calls = []

        def fails(*_):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("a worker lied")

        hook = model.body[1].register_full_backward_hook(fails)
        with pytest.raises(RuntimeError, match="lied"):
            train(tmp_path / "failed", model, RECIPES["sgd"], runtime=runtime)
        hook.remove()
        assert outcome(tmp_path / "failed")[0].step == 2  # what was reached before is saved
        train(tmp_path / "failed", model, RECIPES["sgd"], runtime=runtime, resume=True)
        assert same(weights(model), expected)


# --- places ----------------------------------------------------------------------------------------------------------
EXAMPLE = torch.empty(8, 1, 4, 6)
RATES = {  # which layers stay: the linear one, both, none
    "some": replace(NOTHING, product=1.0, call=1e4),
    "all": replace(NOTHING, call=1.0),
    "none": replace(NOTHING, product=1.0),
}


def by_cost(folder, rates, *, resume=False, stop_after=None):
    with dk.Runtime(SCHEME, None, seed=3) as runtime:
        model = network()
        report = dk.protect_(model, runtime, example=EXAMPLE, rates=RATES[rates])
        stop = pytest.raises(KeyboardInterrupt) if stop_after else nullcontext()
        with stop:
            progress = [StopAfter(stop_after, interrupt)] if stop_after else []
            train(folder, model, RECIPES["sgd"], resume=resume, runtime=runtime, progress=progress)
        return weights(model), [row.name for row in report.masked]


@pytest.mark.parametrize("later", RATES)
def test_a_training_by_cost_goes_on_with_its_places_on_a_machine_that_would_choose_others(later, tmp_path):
    expected, masked = by_cost(tmp_path / "whole", "some")
    assert masked == ["body.0"]
    by_cost(tmp_path / "stopped", "some", stop_after=3)
    found, masked = by_cost(tmp_path / "stopped", later, resume=True)
    assert same(found, expected)
    assert masked == ["body.0"]
    if later != "some":  # by itself that machine ends elsewhere
        assert not same(by_cost(tmp_path / "other", later)[0], expected)


class Depthwise(nn.Module):
    """A depthwise convolution that no module stands for, and that is first called in a step that fails."""

    def __init__(self):
        super().__init__()
        self.filters, self.head, self.fails = nn.Parameter(torch.ones(2, 1, 3, 3)), nn.Linear(16, 3), True

    def forward(self, x):
        y = self.head(nn.functional.conv2d(x.expand(-1, 2, -1, -1), self.filters, groups=2).flatten(1))
        if self.fails:
            self.fails = False
            raise RuntimeError("the fleet is lost")
        return y


def test_a_step_that_failed_leaves_the_places_as_they_are(tmp_path):
    with dk.Runtime(SCHEME, None, seed=3) as runtime:
        model = protected(Depthwise(), runtime)
        with pytest.raises(RuntimeError, match="lost"):
            train(tmp_path, model, runtime=runtime)
        assert runtime.state_dict()["layers"]["filters"]["home"] is True
        assert "home" not in runtime.state_dict()["layers"]["head"]
        train(tmp_path, model, runtime=runtime)
        assert runtime.state_dict()["layers"]["filters"]["home"] is True


def test_a_failure_in_the_evaluation_costs_no_step(tmp_path):
    expected = network()
    train(tmp_path / "whole", expected)
    model = network()
    evaluations = []

    def fails(module, inputs):
        if not module.training:
            evaluations.append(1)
            if len(evaluations) == 2:
                raise RuntimeError("the fleet is lost")

    hook = model.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="lost"):
        train(tmp_path / "failed", model)
    hook.remove()
    assert [path.name for path in sorted((tmp_path / "failed").glob("step-*"))] == ["step-00000008"]
    again = network()
    train(tmp_path / "failed", again, resume=True)
    assert same(weights(again), weights(expected))
    names = [path.name for path in sorted((tmp_path / "failed").glob("step-*"))]
    assert names == ["step-00000008", "step-00000008-2"]
    assert outcome(tmp_path / "failed")[0].finished


def test_a_finished_training_has_nothing_left_to_do(tmp_path):
    model = network()
    first = train(tmp_path, model)
    before = sorted(path.name for path in tmp_path.iterdir())
    again = train(tmp_path, network(), resume=True)
    assert again.epochs == first.epochs
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_more_epochs(tmp_path):
    whole, model = network(), network()
    train(tmp_path / "whole", whole, recipe(epochs=3))
    train(tmp_path / "longer", network())
    train(tmp_path / "longer", model, recipe(epochs=3), resume=True)
    assert same(weights(model), weights(whole))
    with pytest.raises(UsageError, match="another epochs"):
        train(tmp_path / "longer", network(), recipe(epochs=2), resume=True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"learning_rate": 0.1}, "another learning rate"),
        ({"optimizer": "adam", "seed": 4}, "another optimizer, seed"),
        ({"schedule": "cosine", "epochs": 3}, "another epochs, schedule"),
    ],
)
def test_another_recipe_is_refused(tmp_path, change, complaint):
    train(tmp_path, network())
    with pytest.raises(UsageError, match=complaint):
        train(tmp_path, network(), recipe(**change), resume=True)


def test_other_data_another_model_or_another_way_is_refused(tmp_path):
    train(tmp_path, network())
    with pytest.raises(UsageError, match="train examples differ \\(30 there, 36 here\\)"):
        train(tmp_path, network(), resume=True, data=toy(examples=36))
    data = toy()
    shuffled = Dataset("toy", Tensors(data.train_x, data.train_y.flip(0)), data.test, 3)
    with pytest.raises(UsageError, match="its labels differ"):
        train(tmp_path, network(), resume=True, data=shuffled)
    with pytest.raises(DarKnightError, match=r"weights of another model: it lacks '1\.bias'"):
        train(tmp_path, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(24, 3)), resume=True)
    with dk.Runtime(SCHEME, None) as runtime, pytest.raises(UsageError, match="of a training in the clear"):
        train(tmp_path, protected(network(), runtime), resume=True, runtime=runtime)


def test_the_best_model_is_kept(tmp_path):
    model = Scripted(3, 7, 5)
    seen = []

    class Watch(StopAfter):
        def epoch(self, epoch):
            seen.append(weights(model))

    history = train(tmp_path, model, recipe(epochs=3), progress=[Watch(0, None)])
    assert history.best.epoch == 2
    words = json.loads((tmp_path / "best.json").read_text())["state"]
    assert (words["epoch"], words["accuracy"]) == (2, 7 / 9)
    tensors, card, file = read_model(tmp_path)
    assert file.name == "best.safetensors"
    assert card.model == "net"
    assert same(tensors, seen[1])
    assert not same(tensors, seen[2])


def test_checkpoints_come_as_often_as_asked_and_two_stay(tmp_path):
    saved = []

    class Watch(StopAfter):
        def step(self, *, step, **_):
            saved.append(sorted(path.name for path in tmp_path.glob("step-*")))

    train(tmp_path, network(), every=0.0, progress=[Watch(0, None)], extra={"colour": "blue"})
    assert saved[0] == []
    assert saved[3] == ["step-00000002", "step-00000003"]
    (*_, last) = sorted(tmp_path.glob("step-*"))
    assert read_checkpoint(last).extra == {"colour": "blue"}
    assert len(list(tmp_path.glob("step-*"))) == 2
