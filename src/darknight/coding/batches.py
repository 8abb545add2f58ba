"""Virtual batches: a batch of B examples as G = ceil(B / K) groups of K, the last one padded with zero rows."""

from __future__ import annotations

import torch
from torch import Tensor


def group_count(examples: int, inputs: int) -> int:
    """G = ceil(B / K)."""
    return -(-examples // inputs)


def virtual_batches(batch: Tensor, inputs: int) -> Tensor:
    """(example, ...) -> (group, input, ...). Padding rows are zeros and are masked like the rest."""
    examples = batch.shape[0]
    groups = group_count(examples, inputs)
    missing = groups * inputs - examples
    if missing:
        batch = torch.cat([batch, batch.new_zeros(missing, *batch.shape[1:])])
    return batch.reshape(groups, inputs, *batch.shape[1:])


def joined(groups: Tensor, examples: int) -> Tensor:
    """The inverse: (group, input, ...) -> (example, ...), without the padding rows."""
    return groups.flatten(0, 1)[:examples]


def without_padding(batch: Tensor, examples: int) -> Tensor:
    """The first examples of a batch that nothing else refers to, in the same memory: as no view of anything."""
    if examples == len(batch):
        return batch
    shape = (examples, *batch.shape[1:])
    return batch.new_empty(0).set_(batch.untyped_storage(), batch.storage_offset(), shape, batch.stride())
