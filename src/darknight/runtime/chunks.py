"""A large batch goes to workers in a few chunks of whole virtual batches, so that nobody waits for the other in turn:
while workers compute with one chunk, the enclave masks the next and unmasks the last.

    enclave    mask 1, mask 2, unmask 1, mask 3, unmask 2, ...
    workers            1       2         3 ...

A chunk is a call of its own to workers: its own number, noise, decoding and check. Coefficients and scales are those of
the whole batch, and so is the result (docs/adr/0031).

Guarantees: how a batch is cut follows from the scheme and from shapes alone. At most `AHEAD` chunks are with workers at
    any time, and no call has more than `MOST`, however large the batch is. Which of them left the field's range is not
    seen by workers (contract tests: tests/runtime/test_chunks.py).
Leaks: nothing but what shapes say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import pairwise
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from darknight.coding import Scheme, group_count, without_padding
from darknight.errors import RangeError

T = TypeVar("T")
Steps = Generator[None, None, T]  # of one chunk: sends, stops, and goes on with the answers
Into = Callable[[torch.dtype, int], Tensor]  # memory for so many examples

AHEAD = 2  # chunks with workers: one that they compute with, and one that they find when they are done with it
MOST = 8  # of a call
LEAST = 32 << 20  # bytes of input and output of a chunk: below, asking once more is a tenth of the work, or more
WEIGHT = 4  # times what the weights cost once more must be less than what a chunk is


def chunks(scheme: Scheme, x: tuple[int, ...], y: tuple[int, ...], w: tuple[int, ...], itemsize: int) -> list[slice]:
    """The examples of each chunk, from the shapes of input, output and weights.

    Each chunk's check reads the weights, and its backward pass has answers of their size from every worker that takes
    part in it: chunks are no smaller than some times that. And they have two groups or more: what is wrong with an
    answer is found out by asking for a mixture of groups (`runtime.trial`).
    """
    batch = itemsize * (prod(x) + prod(y))
    least = max(LEAST, WEIGHT * itemsize * prod(w) * scheme.base_workers)
    groups = group_count(x[0], scheme.inputs)
    count = max(1, min(MOST, groups // 2, batch // least))
    ends = [min(x[0], scheme.inputs * (place * groups // count)) for place in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def overlapped(calls: Iterable[Steps[T]]) -> list[T]:
    """What became of each of them, in their order; made and begun one after the other, while earlier ones are under
    way. If one fails, nobody waits for those that are. RangeError waits for all of them: workers are not to see which
    chunk's result it was that left the field's range.
    """
    under_way: deque[Steps[T]] = deque()
    results: list[T] = []
    beyond: list[RangeError] = []

    def end(call: Steps[T]) -> None:
        try:
            next(call)
        except StopIteration as returned:
            results.append(returned.value)
        except RangeError as error:
            beyond.append(error)
        else:
            raise AssertionError("a call stops once, when it was sent")

    try:
        for call in calls:
            if len(under_way) == AHEAD:
                end(under_way.popleft())
            next(call)
            under_way.append(call)
        while under_way:
            end(under_way.popleft())
    finally:
        for call in under_way:
            call.close()
    if beyond:
        raise beyond[0]
    return results


class Room:
    """Memory for the result of a whole call, in which each chunk is decoded in its place.

    shape: of the result. inputs: to a group, the last of which is padded.
    """

    def __init__(self, shape: tuple[int, ...], inputs: int) -> None:
        self._examples = shape[0]
        self._shape = (group_count(shape[0], inputs) * inputs, *shape[1:])
        self._made: dict[torch.dtype, Tensor] = {}

    def place(self, begin: int) -> Into:
        """For the chunk that begins with this example; padding is at the end."""
        return partial(self._take, begin)

    def _take(self, begin: int, dtype: torch.dtype, examples: int) -> Tensor:
        if dtype not in self._made:
            self._made[dtype] = torch.empty(self._shape, dtype=dtype)
        return self._made[dtype][begin : begin + examples]

    def whole(self, dtype: torch.dtype) -> Tensor:
        """All of it, as no view of anything."""
        return without_padding(self._made[dtype], self._examples)
