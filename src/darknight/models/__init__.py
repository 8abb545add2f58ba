"""Networks that the command knows by name. They are ordinary torch modules and know nothing of masking.

>>> sorted(MODELS)
['mlp', 'small-cnn']
>>> type(build_model("mlp", shape=(1, 8, 8), classes=10, seed=0)).__name__
'MLP'
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from darknight.errors import UsageError
from darknight.models.mlp import MLP
from darknight.models.small import SmallCNN

# name -> builder, called with the shape of one example (channels, height, width) and the number of classes.
MODELS: dict[str, Callable[[tuple[int, int, int], int], nn.Module]] = {
    "small-cnn": SmallCNN,
    "mlp": MLP,
}


def build_model(name: str, *, shape: tuple[int, int, int], classes: int, seed: int) -> nn.Module:
    """A new model whose initial weights depend on `seed` alone. torch's global generator is left as it was."""
    builder = MODELS.get(name)
    if builder is None:
        raise UsageError(f"unknown model {name!r}; use one of {', '.join(sorted(MODELS))}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return builder(shape, classes)


__all__ = ["MLP", "MODELS", "SmallCNN", "build_model"]
