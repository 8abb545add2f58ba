"""Weights published for torchvision's networks load here (the same names, shapes, types) and mean the same."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from darknight.models.registry import canonical
from models.meta import CIFAR, IMAGENET, on_meta
from models.settled import settle_, settled_images

PUBLISHED = json.loads((Path(__file__).parent / "torchvision.json").read_text(encoding="utf-8"))["models"]


def lines_of(model) -> list[str]:
    return sorted(f"{name} {tuple(entry.shape)} {entry.dtype}" for name, entry in model.state_dict().items())


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_state_dict_is_that_of_torchvision(name):
    published = PUBLISHED[name]
    model = on_meta(canonical(name), IMAGENET, 1000)
    # The examples first: where one of them is wrong, a reader sees which.
    shapes = {entry: list(tensor.shape) for entry, tensor in model.state_dict().items()}
    assert {entry: shapes.get(entry) for entry in published["examples"]} == published["examples"]
    lines = lines_of(model)
    assert len(lines) == published["entries"]
    assert digest(lines) == published["sha256"]
    assert sum(parameter.numel() for parameter in model.parameters()) == published["parameters"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_other_state_dicts_are_told_apart(name):
    """Another number of classes, and one entry of another type."""
    lines = lines_of(on_meta(canonical(name), IMAGENET, 1000))
    retyped = [*lines[:-1], lines[-1].replace("float32", "float64").replace("int64", "int32")]
    assert PUBLISHED[name]["sha256"] not in (digest(lines_of(on_meta(canonical(name), IMAGENET, 10))), digest(retyped))


def test_published_weights_of_mobilenet_fit_the_form_for_small_images_too():
    """Only strides differ, so one can start from them."""
    assert lines_of(on_meta("mobilenet-v2", CIFAR, 1000)) == lines_of(on_meta("mobilenet-v2", IMAGENET, 1000))


HEAVY = {"vgg16", "vgg16_bn", "resnet152"}


def scores_of(model) -> list[float]:
    with torch.inference_mode():
        return settle_(model)(settled_images(1, 64))[0, :5].tolist()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in HEAVY)) for name in PUBLISHED])
def test_the_same_weights_give_the_scores_of_torchvision(name):
    published = PUBLISHED[name]["scores"]
    found = scores_of(on_meta(canonical(name), IMAGENET, 1000).to_empty(device="cpu"))
    assert found == pytest.approx(published, rel=0, abs=1e-3 * max(map(abs, published)))


def test_scores_would_notice_another_activation():
    model = on_meta("mobilenet-v2", IMAGENET, 1000).to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.ReLU6):
            module.max_val = 7.0
    published = PUBLISHED["mobilenet_v2"]["scores"]
    assert scores_of(model) != pytest.approx(published, rel=0, abs=1e-2 * max(map(abs, published)))


@pytest.mark.parametrize("shape", [IMAGENET, CIFAR], ids=["224", "32"])
@pytest.mark.parametrize("name", ["mobilenet-v1", "mobilenet-v2", "mobilenet-small"])
def test_mobilenets_know_no_other_activation_than_relu6(name, shape):
    activations = {type(m) for m in on_meta(name, shape, 10).modules() if isinstance(m, nn.ReLU | nn.Hardtanh)}
    assert activations == {nn.ReLU6}
