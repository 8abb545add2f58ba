"""An image rebuilt from nothing but which units of the first layer were on.

A unit o of a convolution with ReLU is on at a place if w_o * patch + b_o > 0. The weights w are public, so every unit
and place gives one linear inequality on the image; 64 units that each look at nine pixels leave little room. The biases
b stay in the enclave, but they are the same for all images and are found with them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d, softplus

_STEPS = 400
_FASTEST, _SLOWEST = 0.1, 0.005
_SOFTEST, _HARDEST = 0.5, 0.02  # how far on its right side a unit should be, at first and at last
_SMALL = 1e-3  # weight of the preference for small values, which decides where inequalities do not


def images_behind(on: Tensor, weight: Tensor, *, padding: tuple[int, int]) -> Tensor:
    """(example, unit, height, width) flags -> (example, channel, height, width), of unknown brightness.

    weight: (unit, channel, *kernel) on any scale; the convolution has stride 1. Signs are all that is known, so images
    are found up to a factor, and all of them by the same one.
    """
    kernel = weight.to(torch.float32)
    kernel = kernel / kernel.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None, None]
    side = on.to(torch.float32) * 2 - 1
    height, width = (
        size + kernel_size - 1 - 2 * pad
        for size, kernel_size, pad in zip(on.shape[2:], kernel.shape[2:], padding, strict=True)
    )
    images = torch.zeros(len(on), kernel.shape[1], height, width, requires_grad=True)
    biases = torch.zeros(len(kernel), requires_grad=True)
    optimizer = torch.optim.Adam([images, biases])
    for step in range(_STEPS):
        optimizer.param_groups[0]["lr"] = _between(_FASTEST, _SLOWEST, step)
        margin = _between(_SOFTEST, _HARDEST, step)
        optimizer.zero_grad()
        distance = conv2d(images, kernel, biases, padding=padding) * side
        loss = softplus(-distance / margin).sum() * margin + _SMALL * images.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return images.detach()


def read_as_mask(gradients: Tensor) -> Tensor:
    """(example, *feature) of what was seen of the gradient behind a ReLU -> which units were on.

    A unit that is off has no gradient. Where no value is zero, as with masked gradients, the half of each example's
    that is nearest to zero is the best guess.
    """
    size = gradients.flatten(1).abs().to(torch.float64)
    if bool((size == 0).any()):
        return (size > 0).view(gradients.shape)
    return (size > size.median(dim=1, keepdim=True).values).view(gradients.shape)


def _between(first: float, last: float, step: int) -> float:
    return first * math.exp(math.log(last / first) * step / _STEPS)
