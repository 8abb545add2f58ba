"""Training and test examples out of one set."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darknight.errors import DataError, UsageError

TEST_SHARE = 0.2
_AT_ONCE = 1 << 16  # labels that are sorted together: of millions, all at once would take a lot of memory


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
    order, classes = torch.randperm(len(labels), generator=generator).numpy(), labels.numpy()
    counts = np.bincount(classes)
    shares = counts * test_examples  # of each class, in units of 1 / len(labels)
    taken = shares // len(labels)
    missing = test_examples - int(taken.sum())
    taken[(-(shares % len(labels))).argsort(kind="stable")[:missing]] += 1
    # The first `taken` examples of each class, in the shuffled order.
    in_test = np.empty(len(order), dtype=bool)
    for begin in range(0, len(order), _AT_ONCE):
        some = classes[order[begin : begin + _AT_ONCE]]
        in_test[begin : begin + len(some)] = _rank(some) < taken[some]
        taken -= np.minimum(taken, np.bincount(some, minlength=len(taken)))
    return torch.from_numpy(order[~in_test]), torch.from_numpy(order[in_test])


def _rank(classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each example, how many of its class stand before it."""
    by_class, counts = classes.argsort(kind="stable"), np.bincount(classes)
    rank = np.empty_like(by_class)
    rank[by_class] = np.arange(len(classes)) - (counts.cumsum() - counts)[classes[by_class]]
    return rank
