"""Images rebuilt from what one step of training added to public weights (gradient matching).

The attacker has the weights before and after a step. It looks for images, labels and biases whose gradient is the one
it saw (Zhu, Liu, Han 2019), by descent on how far the directions of the gradients are apart (Geiping et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_STEP = 0.05
_SIZE = 0.1  # weight of the gradient's size against its direction
_SPREAD = 0.5  # of the first guess, against that of images


def rebuilt_batches(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    batch: int,
    known: Tensor,
    starts: int,
    steps: int,
    seed: int,
) -> Tensor:
    """(victim, example, feature): what batches of `batch` examples moved the weights by these updates.

    weights: (out, in) of a chain of linear layers with ReLU between them, the same for all victims. updates: for each
    layer (victim, out, in), the gradient of the batch. known: other (example, feature) of the kind, for the range of
    values. Of several starts the one with the nearest gradient is taken. Biases and labels are not known.
    """
    victims, features = len(updates[0]), weights[0].shape[1]
    generator = torch.Generator().manual_seed(seed)
    runs = victims * starts
    noise = torch.randn(runs, batch, features, generator=generator)
    images = (known.mean(dim=0) + _SPREAD * known.std() * noise).requires_grad_()
    scores = torch.randn(runs, batch, weights[-1].shape[0], generator=generator).requires_grad_()  # of the labels
    biases = [torch.zeros(runs, 1, len(weight), requires_grad=True) for weight in weights]
    wanted = [update.repeat_interleave(starts, dim=0) for update in updates]
    low, high = float(known.min()), float(known.max())
    optimizer = torch.optim.Adam([images, scores, *biases])
    distance = torch.zeros(runs)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = _STEP * (1 + math.cos(math.pi * step / steps)) / 2 + 1e-4
        optimizer.zero_grad()
        gradients = _gradients(images, scores.softmax(dim=2), weights, biases)
        distance = sum((_apart(*pair) for pair in zip(gradients, wanted, strict=True)), torch.zeros(runs))
        distance.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            images.clamp_(low, high)
    best = distance.detach().view(victims, starts).argmin(dim=1)
    return images.detach().view(victims, starts, batch, features)[torch.arange(victims), best]


def _gradients(images: Tensor, labels: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Of the cross entropy, by each weight: (run, out, in). Written out, so that they can be differentiated in turn."""
    inputs, sums = [images], list[Tensor]()
    for weight, bias in zip(weights, biases, strict=True):
        sums.append(inputs[-1] @ weight.T + bias)
        inputs.append(sums[-1].relu())
    delta = (sums[-1].softmax(dim=2) - labels) / images.shape[1]
    gradients = [delta.mT @ inputs[-2]]
    for layer in range(len(weights) - 1, 0, -1):
        delta = (delta @ weights[layer]) * (sums[layer - 1] > 0)
        gradients.append(delta.mT @ inputs[layer - 1])
    return gradients[::-1]


def _apart(mine: Tensor, wanted: Tensor) -> Tensor:
    """(run,): 1 - cosine of two gradients, and a little of their difference."""
    mine, wanted = mine.flatten(1), wanted.flatten(1)
    size = wanted.square().sum(dim=1).clamp_min(1e-24)
    return 1 - torch.cosine_similarity(mine, wanted, dim=1) + _SIZE * (mine - wanted).square().sum(dim=1) / size
