"""Evaluation, memory layouts and dtypes, each against the plain model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import darknight as dk
from nn.networks import Functional, cnn, mlp, trained
from nn.three_ways import SCHEME, batches, compare, fleet_runtime, random, train

pytestmark = pytest.mark.usefixtures("one_thread")


# --- evaluation -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    def script(model):
        with mode():
            y = model(random(4, 5))
        return [y, y.is_inference()]

    compare(mlp, script)


def test_workers_keep_no_shares_without_gradients():
    with fleet_runtime() as runtime:
        model = mlp()
        dk.protect_(model, runtime)
        with torch.no_grad():
            model(random(4, 5))
        shares = [record for record in runtime.fleet.transcript(0) if record.kind == "forward.share"]
    assert shares
    assert not any(record.detail["keep"] for record in shares)


def test_inference_mode_then_training():
    def script(model):
        with torch.inference_mode():
            model(random(4, 5))
        return trained(model)

    compare(mlp, script)


def test_training_and_evaluation_interleaved():
    def script(model):
        found = []
        for batch in batches(size=8, shape=(2, 8, 8)):
            train(model.train(), [batch], lr=0.02)
            with torch.no_grad():
                found.append(model.eval()(random(3, 2, 8, 8)))
        return found

    compare(cnn, script, tolerance=0.05)


def test_an_evaluation_between_forward_and_backward():
    def script(model):
        y = model(random(4, 5))
        with torch.no_grad():
            model(random(4, 5, seed=9))
        y.square().sum().backward()
        return []

    compare(mlp, script)


def test_a_scheme_for_inference_evaluates_and_refuses_to_train():
    scheme = SCHEME.for_inference()
    x = random(4, 5)
    with fleet_runtime(scheme) as runtime:
        model = mlp()
        dk.protect_(model, runtime)
        with torch.no_grad():
            assert model(x).shape == (4, 3)
        with pytest.raises(dk.errors.SchemeError, match="inference alone"):
            model(x)


# --- memory and dtypes ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights_too", [False, True])
def test_channels_last(weights_too):
    def build():
        model = nn.Conv2d(2, 4, 3, padding=1)
        return model.to(memory_format=torch.channels_last) if weights_too else model

    def script(model):
        x = random(4, 2, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        return [y, x.grad]

    compare(build, script)


def test_non_contiguous_inputs():
    def script(model):
        x = random(5, 8).t()[::2].requires_grad_()
        y = model(x)
        y.view(-1).square().sum().backward()
        return [y]

    compare(mlp, script)


def test_a_transposed_sequence():
    def script(model):
        y = model(random(3, 4, 5).transpose(0, 1))
        y.square().sum().backward()
        return [y]

    compare(lambda: nn.Linear(5, 6), script)


def test_an_expanded_gradient():
    compare(mlp, lambda model: [model(random(4, 5)).sum().backward()])


def test_the_output_can_be_viewed_and_changed_in_place():
    def script(model):
        y = model(random(4, 2, 6, 6))
        flat = y.view(4, -1)
        flat.mul_(2).add_(1)
        flat.sum().backward()
        return [flat]

    compare(lambda: nn.Conv2d(2, 4, 3), script)


def test_a_float64_model():
    def script(model):
        train(model, batches(dtype=torch.float64))
        return [model(random(4, 5, dtype=torch.float64))]

    compare(lambda: mlp().double(), script)


def test_a_model_that_becomes_float64_after_protecting():
    def script(model):
        model.to(torch.float64)
        train(model, batches(dtype=torch.float64))
        return [model(random(4, 5, dtype=torch.float64))]

    compare(mlp, script)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    def script(model):
        with torch.autocast("cpu", dtype=dtype):
            y = model(random(4, 5))
            loss = F.cross_entropy(y, torch.tensor([0, 1, 2, 0]))
        loss.backward()
        return [y]

    compare(mlp, script, tolerance=0.05)


def test_autocast_leaves_float64_alone():
    def script(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(random(4, 5, dtype=torch.float64))
        y.square().sum().backward()
        return [y]

    compare(lambda: mlp().double(), script)


def test_autocast_of_a_functional_call():
    def script(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(random(4, 5))
        y.float().square().sum().backward()
        return [y]

    compare(Functional, script, tolerance=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision(dtype):
    def script(model):
        y = model(random(4, 5).to(dtype))
        y.float().square().sum().backward()
        return [y]

    compare(lambda: mlp().to(dtype), script, tolerance=0.05)
