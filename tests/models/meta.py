"""Models of full size without their memory."""

import torch
from torch import nn

from darknight.models import MODELS

IMAGENET = (3, 224, 224)
CIFAR = (3, 32, 32)


def on_meta(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Parameters with a shape and no values."""
    with torch.device("meta"):
        return MODELS[name].form_for(shape).build(shape, classes)


def bilinear(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}


def depthwise(model: nn.Module) -> set[str]:
    """Convolutions with one input channel in each group."""
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.groups > 1 and module.weight.shape[1] == 1
    }
