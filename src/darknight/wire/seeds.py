"""Shares that come as a key: what the worker makes of them (`types.Seed` says how).

A twin of randomness.uniform_below over a branch, in rooms that a worker has: neither side needs the other's code, and
tests/wire/test_seeds.py holds them together, bit for bit.

Guarantees: nothing is allocated before the whole of it was granted: the reader asks for the share, and whoever expands
    it for `scratch_bytes` (contract tests: tests/wire/test_seeds.py, tests/worker/test_executor.py).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from darknight.types import BackwardTask, ForwardTask, Seed

KEY_BYTES = 32

_PIECE = 1 << 16  # numbers at a time
_ZEROS = memoryview(bytes(4 * _PIECE))
_REDRAWN = 32  # bytes for each number that is drawn again: its place, the number, and copies of both
_FEW = 1 << 10


def shadow(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The form of a tensor, without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def share_of(task: ForwardTask | BackwardTask) -> Tensor:
    """The share of a task: as it came, or made from its seed."""
    if task.seed is None or not task.tensor.is_meta:
        return task.tensor
    return expanded(task.seed, tuple(task.tensor.shape))


def expanded(seed: Seed, shape: tuple[int, ...]) -> Tensor:
    """The residues that a seed stands for, int32."""
    keystream = Cipher(algorithms.AES(seed.key), modes.CTR(bytes(16))).encryptor()
    last = seed.prime - 1
    values = _words(keystream, prod(shape))
    rejected = _cut(values, last)
    while len(rejected):
        redrawn = _words(keystream, len(rejected))
        again = _cut(redrawn, last)
        values[rejected] = redrawn
        rejected = rejected[again]
    return values.view(shape)


def scratch_bytes(task: ForwardTask | BackwardTask) -> int:
    """What making a share takes for a moment beside it: more than that with less than one chance in 2^400."""
    if task.seed is None:
        return 0
    values, count = 1 << (task.seed.prime - 1).bit_length(), task.tensor.numel()
    redrawn = count * (values - task.seed.prime) // values
    return _REDRAWN * min(count, 2 * redrawn + _FEW) + 2 * min(count, _PIECE)


def _words(keystream: Any, count: int) -> Tensor:
    words = torch.empty(count, dtype=torch.int32)
    memory = words.numpy().data.cast("B") if count else memoryview(b"")
    for begin in range(0, len(memory), len(_ZEROS)):
        piece = memory[begin : begin + len(_ZEROS)]
        keystream.update_into(_ZEROS[: len(piece)], piece)
    return words


def _cut(words: Tensor, last: int) -> Tensor:
    """Cuts words to the bits of `last` in place; the places, in order, of those that are still above it."""
    mask, places = (1 << last.bit_length()) - 1, []
    for begin in range(0, len(words), _PIECE):
        piece = words[begin : begin + _PIECE].bitwise_and_(mask)
        if int(piece.max()) > last:
            places.append((piece > last).nonzero().squeeze(1) + begin)
    return torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
