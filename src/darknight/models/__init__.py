"""Networks that the command knows by name. They are ordinary torch modules and know nothing of masking.

>>> "resnet18" in MODELS
True
>>> type(build_model("mlp", shape=(1, 8, 8), classes=10, seed=0)).__name__
'MLP'
>>> describe("mobilenet-v2", (3, 32, 32), 10).form
'CIFAR'

A network that has no name is described by plain values (`darknight.models.described`).

In their ImageNet form vgg16, vgg16-bn, resnet18, resnet50, resnet152 and mobilenet-v2 have the state_dict names and
shapes of torchvision, so that published weights load. It has no mobilenet-v1.
"""

from __future__ import annotations

from darknight.models.described import LIMITS, Limits, build_described, check_description
from darknight.models.description import Description, describe
from darknight.models.layer_types import LAYERS, LayerType
from darknight.models.mlp import MLP
from darknight.models.mobilenet import MobileNetV1, MobileNetV2
from darknight.models.registry import MODELS, Entry, Form, build_model, canonical, check_sizes
from darknight.models.resnet import ResNet
from darknight.models.small import SmallCNN
from darknight.models.vgg import VGG

__all__ = [
    "LAYERS",
    "LIMITS",
    "MLP",
    "MODELS",
    "VGG",
    "Description",
    "Entry",
    "Form",
    "LayerType",
    "Limits",
    "MobileNetV1",
    "MobileNetV2",
    "ResNet",
    "SmallCNN",
    "build_described",
    "build_model",
    "canonical",
    "check_description",
    "check_sizes",
    "describe",
]
