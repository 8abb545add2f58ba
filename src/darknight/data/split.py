"""Training and test examples out of one set."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from darknight.errors import DataError, UsageError

TEST_SHARE = 0.2


def size_of_test(examples: int, share: float | None, name: str) -> int:
    """How many of `examples` are for testing: `share` of them, rounded up."""
    if share is None:
        share = TEST_SHARE
    if not 0 < share < 1:
        raise UsageError(f"a test share of {share:g}; needs a number between 0 and 1.")
    count = math.ceil(examples * share - 1e-9)  # 0.1 * 30 is a little more than 3
    if count >= examples:
        raise DataError(
            f"{name}: {examples} examples, of which {count} would be for testing. Needs at least one for training."
        )
    return count


def stratified_split(labels: Tensor, test_examples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of training and of test examples, shuffled, with every class in the test part in its proportion.

    The test part has exactly `test_examples`: whole shares first, then one more for the classes whose share was cut
    the most.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    counts = torch.bincount(labels)
    shares = counts * test_examples  # of each class, in units of 1 / len(labels)
    taken = shares // len(labels)
    missing = test_examples - int(taken.sum())
    taken[(shares % len(labels)).argsort(descending=True, stable=True)[:missing]] += 1
    # The first `taken` examples of each class, in the shuffled order: their rank within the class decides.
    shuffled = labels[order]
    by_class = shuffled.argsort(stable=True)
    rank = torch.empty_like(by_class)
    rank[by_class] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[shuffled[by_class]]
    in_test = rank < taken[shuffled]
    return order[~in_test], order[in_test]
