"""What workers get as weights is what the model's weights are now, whoever changed them, at the scale they ask for."""

import math

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.coding.fixed_point import exponent_for
from darknight.kernels import reference
from darknight.runtime.field import FieldCalls

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = dk.Scheme(inputs=2, colluders=1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4 * 3, 1500), nn.Linear(1500, 3))


def batch(seed=0):
    return torch.randn(4, 2, 6, 5, generator=torch.Generator().manual_seed(seed))


def belong(runtime, model):
    """Whether the weights that were sent last are the integers, scale and sizes of those that the model has now."""
    with torch.no_grad():
        model(batch())
    found = []
    for name, layer in runtime._layers.items():
        w, sent = model.get_submodule(name).weight.detach(), layer.weights
        exponent = exponent_for(float(w.abs().max()), 10)
        fresh = FieldCalls.weights(runtime._calls, sent.op, w, None, keep=False)
        same = torch.equal(sent.tensor, reference.quantise_nearest(w, exponent))
        found.append(same and (sent.exponent, sent.sizes) == (exponent, fresh.sizes))
    return found == [True] * 3


OPTIMIZERS = {
    "sgd": lambda them: torch.optim.SGD(them, lr=0.1),
    "momentum": lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True),
    "fused": lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "foreach": lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.9, maximize=True, foreach=True),
    "adam": lambda them: torch.optim.Adam(them, lr=0.1, amsgrad=True),
    "adamw": lambda them: torch.optim.AdamW(them, lr=0.1, fused=True),
    "lbfgs": lambda them: torch.optim.LBFGS(them, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_is_followed(make):
    model = network()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        optimizer = make(model.parameters())

        def closure():
            optimizer.zero_grad()
            loss = model(batch(1)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            before = [layer.version for layer in sent(runtime)]
            optimizer.step(closure)
            assert belong(runtime, model)
            assert before != [layer.version for layer in sent(runtime)]


def sent(runtime):
    return [layer.weights for layer in runtime._layers.values() if layer.weights is not None]


@torch.no_grad()
def of_the_last_alone(model):
    model[4].weight[2, 1499] += 0.05


def past_autograd(model):
    model[3].weight.data[1400, 7] += 0.05


def through_numpy(model):
    model[3].weight.detach().numpy()[700, 3] += 0.05


def loaded(model):
    other = network()
    nn.init.normal_(other[3].weight)
    model.load_state_dict(other.state_dict())


def another_parameter(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().flip(0))


def from_one_vector(model):
    """As averaged weights are put in for an evaluation: every parameter lies elsewhere afterwards."""
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(0.9 * vector, model.parameters())


CHANGES = [of_the_last_alone, past_autograd, through_numpy, loaded, another_parameter, from_one_vector]
BEHIND = [past_autograd, through_numpy]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed_however_it_was_made(change):
    model = network()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        assert belong(runtime, model)
        versions = [layer.version for layer in sent(runtime)]
        assert belong(runtime, model)
        assert versions == [layer.version for layer in sent(runtime)]  # nothing is sent again without need
        change(model)
        assert belong(runtime, model)
        assert versions != [layer.version for layer in sent(runtime)]


@pytest.mark.parametrize("change", BEHIND, ids=lambda change: change.__name__)
def test_who_asked_torchs_version_counter_would_miss_it(change, monkeypatch):
    """Why weights are read and not believed. The test above can fail."""
    seen = {}

    def same_version(self, weights, w):
        return seen.setdefault(weights, (w._version, w.data_ptr())) == (w._version, w.data_ptr())

    monkeypatch.setattr(FieldCalls, "are_still", same_version)
    model = network()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        assert belong(runtime, model)
        assert belong(runtime, model)
        change(model)
        assert not belong(runtime, model)


@pytest.mark.parametrize("factor", [1.5, 3.0, 1e6, 1e30, 0.7, 0.3, 1e-6, 1e-30, 0.0])
def test_the_scale_follows_weights_that_grow_or_shrink(factor):
    model = network()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        assert belong(runtime, model)
        for factors in (factor, 1 / factor if factor else 1.0):
            with torch.no_grad():
                model[0].weight.mul_(factors)  # the bias keeps what follows in range
                model[4].weight.mul_(factors)
            assert belong(runtime, model)
        with torch.no_grad():
            model[3].weight.add_(1e-3)
        assert belong(runtime, model)


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused_and_good_ones_taken_afterwards(strange):
    model = network()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        assert belong(runtime, model)
        good = float(model[3].weight.detach()[1, 1])
        model[3].weight.data[1, 1] = strange
        with pytest.raises(dk.errors.EncodingError, match="layer 3: its weight: values that are NaN or infinite"):
            model(batch())
        model[3].weight.data[1, 1] = good
        assert belong(runtime, model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_other_dtypes_are_followed_too(dtype):
    layer = nn.Linear(5, 7, dtype=dtype)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(layer, runtime)
        for step in range(3):
            with torch.no_grad():
                layer.weight.add_(0.25 * step)
                layer(torch.randn(4, 5, dtype=dtype))
            (weights,) = sent(runtime)
            w = layer.weight.detach().double()
            assert weights.exponent == exponent_for(float(w.abs().max()), 10)
            assert torch.equal(weights.tensor, reference.quantise_nearest(w, weights.exponent))
