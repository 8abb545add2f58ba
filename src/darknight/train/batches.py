"""Which examples each step gets, and what is drawn for it: functions of the seed and the position alone.

So a training that is resumed anywhere sees what it would have seen, and nothing of it has to be saved.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from darknight.data import Dataset
from darknight.train.recipe import Recipe

_EVALUATION_BATCH, _EVALUATION_VALUES = 256, 1 << 22


def batches_per_epoch(recipe: Recipe, examples: int) -> int:
    return math.ceil(examples / recipe.batch_size)


def order_of(recipe: Recipe, epoch: int, examples: int) -> tuple[Tensor, ...]:
    """The numbers of the examples, batch by batch."""
    order = torch.randperm(examples, generator=generator_for(recipe.seed, "order", epoch))
    return torch.split(order, recipe.batch_size)


def training_batch(data: Dataset, recipe: Recipe, chosen: Tensor, epoch: int, index: int) -> tuple[Tensor, Tensor]:
    """Examples, augmented if the recipe says so, and labels."""
    x = data.train.examples(chosen)
    if recipe.augment is not None:
        x = recipe.augment(x, generator_for(recipe.seed, "augment", epoch, index))
    return x, data.train.labels[chosen]


def generator_for(seed: int, purpose: str, *position: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, purpose, *position))


def seed_for(seed: int, purpose: str, *position: int) -> int:
    """63 bits that other purposes and positions do not share."""
    text = f"{purpose} {seed} {' '.join(map(str, position))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def evaluation_batch(shape: tuple[int, ...]) -> int:
    """How many examples are evaluated together: fewer of large images, whose activations must fit into memory."""
    return max(1, min(_EVALUATION_BATCH, _EVALUATION_VALUES // math.prod(shape)))
