"""What a network costs, without building it: parameters, multiplications, bilinear layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from darknight.models.registry import MODELS, Shape, canonical, find_form

_BILINEAR = (nn.Conv2d, nn.Linear)


@dataclass(frozen=True, kw_only=True)
class Description:
    """One network for images of one shape.

    form: "ImageNet", "CIFAR", or "any" where a network has only one. parameters: what is trained. macs: products with
    a weight (each with its addition) in the forward pass of one image, biases and everything else left out.
    bilinear_layers: its convolutions and linear layers, which is what workers can compute on shares. smallest: pixels
    of the shorter side of the smallest image that it takes, in whichever form.
    """

    name: str
    form: str
    shape: Shape
    classes: int
    parameters: int
    macs: int
    bilinear_layers: int
    smallest: int
    note: str


def describe(name: str, shape: Shape, classes: int) -> Description:
    """Counted on torch's meta device: no memory, no arithmetic, no random numbers.

    >>> describe("resnet18", (3, 224, 224), 1000).parameters
    11689512
    """
    form = find_form(name, shape, classes)
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        model = form.build(shape, classes).eval()
        layers = [module for module in model.modules() if isinstance(module, _BILINEAR)]
        macs = 0

        def count(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            nonlocal macs
            weight = module.get_parameter("weight")
            macs += weight.numel() * (out.numel() // weight.shape[0])  # every position uses every weight once

        for layer in layers:
            layer.register_forward_hook(count)
        model(torch.empty(1, *shape))
    entry = MODELS[canonical(name)]
    return Description(
        name=canonical(name),
        form=form.name,
        shape=shape,
        classes=classes,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        macs=macs,
        bilinear_layers=len(layers),
        smallest=entry.smallest,
        note=entry.note,
    )
