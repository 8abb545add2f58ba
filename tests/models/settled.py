"""Weights and images that need no random generator, so that they are the same everywhere and for ever."""

import math

import torch
from torch import Tensor, nn


def settled(count: int, which: int) -> Tensor:
    """`count` numbers from -1 to 1, spread like random ones: a hash of 0, 1, 2, ..., another one for each `which`."""
    mixed = (torch.arange(count) + which * 1_000_003) * 2_654_435_761 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 16) * 2_246_822_519 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * 3_266_489_917 & 0xFFFFFFFF
    return ((mixed ^ mixed >> 16).double() / 2**31 - 1).float()


@torch.no_grad()
def settle_(model: nn.Module) -> nn.Module:
    """Fills everything: matrices and kernels so that signals keep their size, the rest near one or zero."""
    for which, (name, entry) in enumerate(model.state_dict().items()):
        if not entry.is_floating_point():
            continue
        numbers = settled(entry.numel(), which).view(entry.shape)
        if entry.dim() > 1:
            entry.copy_(numbers * math.sqrt(6 / entry[0].numel()))
        elif name.endswith("running_var"):
            entry.copy_(1 + numbers / 2)
        elif name.endswith("weight"):
            entry.copy_(0.7 + numbers / 2)
        else:
            entry.copy_(numbers)
    return model.eval()


def settled_images(batch: int, side: int) -> Tensor:
    return 2 * settled(batch * 3 * side * side, 10_000).view(batch, 3, side, side)
