"""Recipes, the learning rates of their steps, and their optimizers."""

import json
import math

import pytest
import torch
from torch import nn

from darknight.data import Augmentation
from darknight.errors import DataError, UsageError
from darknight.train import Recipe, learning_rate_at
from darknight.train.optimizers import load_optimizer, make_optimizer, optimizer_tensors


def recipe(**change) -> Recipe:
    return Recipe(**{"epochs": 10, "batch_size": 8, "learning_rate": 0.5, **change})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"epochs": 0}, "epochs 0; needs a whole number of at least 1"),
        ({"epochs": 2.5}, r"epochs 2\.5"),
        ({"batch_size": 0}, "batch size 0"),
        ({"learning_rate": 0.0}, "learning rate 0; needs a finite number above 0"),
        ({"learning_rate": math.nan}, "learning rate nan"),
        ({"learning_rate": math.inf}, "learning rate inf"),
        ({"optimizer": "lbfgs"}, "optimizer 'lbfgs'; use one of sgd, adam, adamw"),
        ({"schedule": "linear"}, "schedule 'linear'; use one of constant, cosine, step, one-cycle"),
        ({"momentum": 1.0}, "momentum 1; needs a finite number at least 0 and below 1"),
        ({"weight_decay": -1e-4}, "weight decay -0.0001"),
        ({"step_factor": 0.0}, "step factor 0"),
        ({"step_epochs": 0}, "step epochs 0"),
        ({"clip": 0.0}, "clip 0"),
        ({"label_smoothing": 1.0}, "label smoothing 1"),
        ({"seed": -1}, "seed -1"),
        ({"early_stop": 0}, "early stop 0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov is for"),
        ({"nesterov": True, "optimizer": "adam"}, "nesterov is for"),
        ({"warmup_epochs": 10}, "warmup epochs 10 of 10"),
        ({"warmup_epochs": 1, "schedule": "one-cycle"}, "a warmup of its own"),
    ],
)
def test_what_makes_no_sense_is_refused(change, complaint):
    with pytest.raises(UsageError, match=complaint):
        recipe(**change)


@pytest.mark.parametrize("augment", [None, Augmentation(cutout=3), Augmentation.imagenet()])
def test_a_recipe_survives_json(augment):
    before = recipe(optimizer="adamw", clip=1.5, early_stop=3, augment=augment)
    assert Recipe.from_words(json.loads(json.dumps(before.words()))) == before


@pytest.mark.parametrize(
    "change",
    [{"colour": 1}, {"epochs": None}, {"epochs": "3"}, {"epochs": True}, {"nesterov": 1}, {"augment": {"hue": 1}}],
)
def test_other_words_are_refused(change):
    with pytest.raises(UsageError):
        Recipe.from_words({**recipe().words(), **change})


def rates(steps_per_epoch=4, **change) -> list[float]:
    made = recipe(**change)
    return [learning_rate_at(made, step, steps_per_epoch) for step in range(made.epochs * steps_per_epoch)]


def test_constant():
    assert set(rates()) == {0.5}


def test_cosine_is_torchs():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    expected = []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(schedule="cosine") == pytest.approx(expected)


def test_one_cycle_is_close_to_torchs():
    """Torch puts the peak a step earlier."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=400)
    expected = []
    for _ in range(400):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    found = rates(schedule="one-cycle", steps_per_epoch=40)
    assert found == pytest.approx(expected, abs=0.01)
    assert (found[0], found[-1], max(found)) == pytest.approx((0.02, 2e-6, 0.5), rel=1e-3)


def test_steps():
    found = rates(schedule="step", step_epochs=3, step_factor=0.1)
    assert found[:12] == [0.5] * 12
    assert found[12:24] == pytest.approx([0.05] * 12)
    assert found[36:] == pytest.approx([0.0005] * 4)


def test_warmup_rises_in_a_straight_line_and_the_schedule_follows():
    found = rates(schedule="cosine", warmup_epochs=2)
    assert found[:8] == pytest.approx([0.5 * (step + 1) / 8 for step in range(8)])
    assert found[8] == 0.5
    assert found[8:] == sorted(found[8:], reverse=True)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(self.layer(x))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_weight_decay_spares_biases_and_norms(optimizer):
    model = Network()
    made = make_optimizer(model, recipe(optimizer=optimizer, weight_decay=0.25))
    decay = {id(one): group["weight_decay"] for group in made.param_groups for one in group["params"]}
    assert {name: decay[id(one)] for name, one in model.named_parameters()} == {
        "layer.weight": 0.25,
        "layer.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }


def stepped(how, model=None):
    model = model or Network()
    made = make_optimizer(model, how)
    for _ in range(2):
        made.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        made.step()
    return model, made


@pytest.mark.parametrize("change", [{"momentum": 0.0}, {}, {"optimizer": "adam"}, {"optimizer": "adamw"}])
def test_the_state_of_an_optimizer_goes_through_names_and_back(change):
    how = recipe(**change)
    model, made = stepped(how)
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(made, model).items()}
    other = make_optimizer(model, how)
    load_optimizer(other, model, how, tensors)
    again = optimizer_tensors(other, model)
    assert again.keys() == tensors.keys()
    assert bool(tensors) == (change != {"momentum": 0.0})
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_frozen_parameters_have_no_state():
    model = Network()
    model.layer.bias.requires_grad_(False)
    _, made = stepped(recipe(), model)
    assert "momentum_buffer/layer.bias" not in optimizer_tensors(made, model)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda state: state.update({"exp_avg/other": torch.zeros(3)}), "which adam of this model has not"),
        (lambda state: state.update({"momentum_buffer/norm.bias": torch.zeros(3)}), "which adam of this model has not"),
        (lambda state: state.pop("exp_avg/norm.bias"), "only step, exp_avg_sq of norm.bias"),
        (lambda state: state.update({"exp_avg/norm.bias": torch.zeros(4)}), r"of shape \(4,\); needs"),
        (lambda state: state.update({"step/norm.bias": torch.zeros(3)}), r"needs torch.float32 of shape \(\)"),
        (lambda state: state.update({"exp_avg/norm.bias": torch.zeros(3).double()}), "is torch.float64"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(damage, complaint):
    how = recipe(optimizer="adam")
    model, made = stepped(how)
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(made, model).items()}
    damage(tensors)
    other = make_optimizer(model, how)
    with pytest.raises(DataError, match=complaint):
        load_optimizer(other, model, how, tensors)
    assert not other.state
