"""Every network can be protected whole. By itself, protect_ leaves depthwise convolutions in the enclave, and no other
product."""

import pytest
import torch

import darknight as dk
from darknight.models import MODELS, build_model
from darknight.ops.place import DEPTHWISE
from models.meta import CIFAR, IMAGENET, bilinear, depthwise, on_meta
from nn.three_ways import everything

SCHEME = dk.Scheme(inputs=2, colluders=1)


@pytest.mark.parametrize("shape", [IMAGENET, CIFAR], ids=["224", "32"])
@pytest.mark.parametrize("name", MODELS)
def test_every_convolution_and_linear_layer_is_masked(name, shape):
    model = on_meta(name, shape, 1000).to_empty(device="cpu")  # memory that nobody touches costs nothing
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime, where=everything)
        assert {row.name for row in report.masked} == bilinear(model)
        assert not bilinear(model) & {row.name for row in report.enclave}
        dk.unprotect_(model)


@pytest.mark.parametrize("name", MODELS)
def test_left_to_itself_it_keeps_depthwise_convolutions_and_no_other_product(name):
    model = on_meta(name, IMAGENET, 1000).to_empty(device="cpu")
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime)
        assert {row.name for row in report.masked} == bilinear(model) - depthwise(model)
        assert {row.name for row in report.enclave if row.why == DEPTHWISE} == depthwise(model)
        assert bool(depthwise(model)) == name.startswith("mobilenet")
        dk.unprotect_(model)


@pytest.mark.parametrize("name", ["vgg-small", "resnet-small", "mobilenet-small", "small-cnn", "mlp"])
def test_a_step_leaves_no_product_in_the_enclave(name):
    model = build_model(name, shape=(3, 8, 8), classes=5, seed=0)
    with dk.Runtime(SCHEME, None, seed=0) as runtime:
        report = dk.protect_(model, runtime, where=everything)
        model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        assert {(row.name, row.calls) for row in report.masked} == {(layer, 1) for layer in bilinear(model)}
        assert not any(row.flops for row in report.enclave)
        assert all(parameter.grad is not None for parameter in model.parameters())
        dk.unprotect_(model)
