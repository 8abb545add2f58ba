"""Copies, states, several models, compiled and closed ones, each against the plain model."""

import copy
import io

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.errors import FleetError, ProtectError
from fleet.threads import thread_fleet
from nn.networks import Functional, mlp
from nn.three_ways import SCHEME, assert_same, batches, compare, fleet_runtime, random, snapshot, train

pytestmark = pytest.mark.usefixtures("one_thread")


# --- copies, states, several models ---------------------------------------------------------------------------------
def test_a_deep_copy_is_protected_and_learns_by_itself():
    def script(model):
        before = copy.deepcopy(model.state_dict())
        twin = copy.deepcopy(model)
        train(twin, batches())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return [*twin.parameters(), twin(random(4, 5)).detach(), model(random(4, 5))]

    report = compare(mlp, script)
    assert all(row.calls for row in report.masked)


def test_unprotecting_a_copy_leaves_the_original_protected():
    model = mlp()
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime)
        twin = copy.deepcopy(model)
        dk.unprotect_(twin)
        twin(random(4, 5))
        assert [row.calls for row in report.masked] == [0, 0]
        model(random(4, 5))
        assert [row.calls for row in report.masked] == [1, 1]


def test_a_state_dict_saved_and_loaded():
    def script(model):
        train(model, batches())
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        train(model, batches(1))
        file.seek(0)
        assert model.load_state_dict(torch.load(file, weights_only=True)).missing_keys == []
        return [model(random(4, 5))]

    compare(mlp, script)


def test_a_state_dict_moves_between_plain_and_protected_models():
    model, plain = mlp(), mlp()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        plain.load_state_dict(model.state_dict())
        model.load_state_dict(plain.state_dict())
        assert_same(snapshot(model), snapshot(plain))


@pytest.mark.parametrize("change", ["data", "no_grad", "assign"])
def test_weights_changed_behind_autograds_back_reach_the_workers(change):
    new = random(7, 5, seed=11)

    def script(model):
        first = model(random(4, 5))
        if change == "data":
            model[0].weight.data.copy_(new)
        elif change == "no_grad":
            with torch.no_grad():
                model[0].weight.mul_(0).add_(new)
        else:
            model[0].weight = nn.Parameter(new.clone())
        return [first, model(random(4, 5))]

    compare(mlp, script)


def test_several_models_under_one_runtime():
    def gan():
        return nn.ModuleList([mlp(), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))])

    def script(models):
        generator, judge = models
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for step in range(2):
            for number in (1, 0):
                optimizers[number].zero_grad()
                score = judge(generator(random(4, 5, seed=step)))
                ((-1) ** number * score.mean()).backward()
                optimizers[number].step()
        return [p.detach() for p in models.parameters()]

    torch.manual_seed(0)
    plain = script(gan())
    found = []
    for runtime_of in (lambda: dk.Runtime(SCHEME, None), fleet_runtime):
        torch.manual_seed(0)
        models = gan()
        with runtime_of() as runtime:
            reports = [dk.protect_(model, runtime) for model in models]
            found.append(script(models))
        assert all(row.calls for report in reports for row in report.masked)
    for expected, alone, fleet in zip(plain, *found, strict=True):
        assert torch.equal(alone, fleet)
        assert (fleet - expected).norm() <= 0.02 * expected.norm() + 1e-6


def test_an_optimizer_made_before_protecting():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with fleet_runtime() as runtime:
        dk.protect_(model, runtime)
        model(random(4, 5)).square().sum().backward()
        optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_training_goes_on_after_unprotecting():
    model = mlp()
    with fleet_runtime() as runtime:
        dk.protect_(model, runtime)
        train(model, batches())
        dk.unprotect_(model)
    before = snapshot(model)
    train(model, batches())
    assert any(not torch.equal(a, b) for a, b in zip(before.values(), snapshot(model).values(), strict=True))


def test_a_forward_that_is_followed_by_unprotecting_still_goes_backward():
    def script(model):
        y = model(random(4, 5))
        if hasattr(model[0], "_darknight"):
            dk.unprotect_(model)
        y.square().sum().backward()
        return []

    compare(mlp, script)


def test_a_closed_runtime_is_refused_by_name():
    model = mlp()
    with fleet_runtime() as runtime:
        dk.protect_(model, runtime)
    before = snapshot(model)
    with pytest.raises(FleetError, match=r"layer 0: its runtime is closed.*unprotect_"):
        model(random(4, 5))
    assert_same(before, snapshot(model))


def test_a_closed_fleet_is_refused():
    model = mlp()
    with thread_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        dk.protect_(model, runtime)
        fleet.close()
        with pytest.raises(FleetError, match="fleet is closed"):
            model(random(4, 5))


# --- compiled -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_still_draws_new_noise_for_every_call(compiled_first):
    model, x = nn.Sequential(nn.Linear(5, 4), Functional(4)), random(4, 5)
    expected = model(x)
    with fleet_runtime() as runtime:
        if compiled_first:
            model = torch.compile(model, backend="eager")
            report = dk.protect_(model, runtime)
        else:
            report = dk.protect_(model, runtime)
            model = torch.compile(model, backend="eager")
        for _ in range(3):
            y = model(x)
            y.sum().backward()
            assert (y - expected).norm() <= 0.02 * expected.norm()
        shares = [r.tensor for r in runtime.fleet.transcript(0) if r.kind == "forward.share" and r.layer.endswith("0")]
    assert {row.calls for row in report.masked} == {3}
    assert len(shares) == 3
    assert not torch.equal(shares[0], shares[1])
    assert not torch.equal(shares[1], shares[2])


# --- twice differentiated -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [1, 2])
def test_a_gradient_penalty_is_refused_instead_of_being_wrong(depth):
    model = nn.Sequential(*mlp()[: 2 * depth - 1])
    x = random(4, 5).requires_grad_()
    with fleet_runtime() as runtime:
        dk.protect_(model, runtime)
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(ProtectError, match="twice"):
            (y.square().mean() + gradient.square().sum()).backward()


def test_a_graph_of_the_gradient_that_nobody_uses_is_allowed():
    def script(model):
        x = random(4, 5).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return [gradient.detach()]

    compare(mlp, script)


def test_unprotecting_a_copy_leaves_the_original_as_it_is():
    with fleet_runtime() as runtime:
        model = nn.Sequential(nn.Linear(5, 3))
        dk.protect_(model, runtime)
        twin = copy.deepcopy(model)
        model(random(4, 5)).sum().backward()
        dk.unprotect_(twin)
        assert runtime.state_dict()["layers"]["0"]["gradients"] == 1
        model(random(4, 5)).sum().backward()
        assert runtime.state_dict()["layers"]["0"]["gradients"] == 2
        dk.unprotect_(model)
        assert not runtime.state_dict()["layers"]
