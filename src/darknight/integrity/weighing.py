"""Exact sums weighed with random vectors: integers in float64, for Freivalds' check in the field.

Every sum here stays within 2^53, so none is rounded. A first sum over a large tensor is cut into *blocks* so short that
operands of magnitude p/2 fit; what it leaves is a fraction of the tensor, and further sums over it are made from
balanced digits of whichever operand is cheaper to split (ops.field.split), and reduced modulo each prime.

Axes: `block` and `rep` as above, `modulus` for results reduced modulo each of the primes of `Moduli`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from darknight.ops import BilinearOp
from darknight.ops.field import EXACT, Limbs, limbs_for, split

_CHUNK = 1 << 19  # elements converted to float64 at a time: they stay in cache between conversion and product
# Sums are kept this little below 2^53, because reduction needs the multiple of the prime next to a sum to be exact too.
_SLACK = 1 + 2.0**-24
_ROOM = 2.0**44  # sums of the larger operand up to here leave the digits of the smaller one 9 bits or more
_LONGEST = 1 << 16  # terms of an inner product of two reduced operands: 27 + 16 bits leave its digits 9


class Moduli:
    """One or two primes, and reduction modulo all of them at once."""

    def __init__(self, primes: Sequence[int]) -> None:
        self.half = float(max(primes) // 2 + 8)  # what a reduced value is at most
        self._negative = torch.tensor(primes, dtype=torch.float64).neg_()
        self._inverse = self._negative.reciprocal().neg_()

    def __len__(self) -> int:
        return len(self._negative)

    def reduced(self, values: Tensor) -> Tensor:
        """(modulus, ...) or (1, ...) -> (modulus, ...): as ops.field.centred, modulo each prime."""
        axes = (-1, *(1,) * (values.dim() - 1))
        return (values * self._inverse.view(axes)).round_().mul_(self._negative.view(axes)).add_(values)

    def recombined(self, partials: Sequence[Tensor], limbs: Limbs) -> Tensor:
        """As ops.field.recombined, of exact partials (...), lowest first; gives (modulus, ...)."""
        total = self.reduced(partials[-1])
        for partial in reversed(partials[:-1]):
            total = self.reduced(total * 2.0**limbs.bits + self.reduced(partial))
        return total


# --- first sums, over large tensors -----------------------------------------------------------------------------------
class _Scratch(threading.local):
    """One buffer for conversions, kept: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.buffer = torch.empty(0, dtype=torch.float64)

    def doubles(self, part: Tensor) -> Tensor:
        """`part` in float64; valid until the next call."""
        if self.buffer.numel() < part.numel():
            with torch.inference_mode(False):  # an inference tensor could not be reused outside that mode
                self.buffer = torch.empty(max(_CHUNK, part.numel()), dtype=torch.float64)
        return self.buffer[: part.numel()].view(part.shape).copy_(part)


scratch = _Scratch()


def block_length(largest: float, entry: float) -> int:
    """How many products of values up to `largest` with entries up to `entry` can be summed exactly."""
    return max(1, int(EXACT // (largest * entry * _SLACK)))


def over_channels(op: BilinearOp, rows: Tensor, vectors: Tensor, groups: int, longest: int) -> Tensor:
    """(row, channel, ...) and (rep, channel) -> (block, row, group * rep, ...): sums over at most `longest` channels."""
    count, channels = rows.shape[:2]
    own = channels // groups
    blocks = [slice(start, min(start + longest, own)) for start in range(0, own, longest)]
    out = torch.empty(len(blocks), count, groups * vectors.shape[0], *rows.shape[2:], dtype=torch.float64)
    step = max(1, _CHUNK // max(1, rows[:1].numel()))
    for start in range(0, count, step):
        part = scratch.doubles(rows[start : start + step])
        for place, block in enumerate(blocks):
            some, weights = (_of_each_group(each, groups, block) for each in (part, vectors))
            out[place, start : start + step] = op.fold_channels(some, weights, groups)
    return out


def _of_each_group(tensor: Tensor, groups: int, block: slice) -> Tensor:
    """A block of each group's channels, which are the second axis."""
    if groups == 1:
        return tensor[:, block]
    return tensor.unflatten(1, (groups, tensor.shape[1] // groups))[:, :, block].flatten(1, 2)


def over_rows(rows: Tensor, vectors: Tensor, longest: int) -> Tensor:
    """(row, ...) and (rep, row) -> (block, rep, ...): sums over at most `longest` rows."""
    flat = rows.flatten(1)
    blocks = list(torch.split(flat, longest))
    out = torch.empty(len(blocks), vectors.shape[0], flat.shape[1], dtype=torch.float64)
    for place, (block, weights) in enumerate(zip(blocks, torch.split(vectors, longest, dim=1), strict=True)):
        step = max(1, _CHUNK // max(1, block.shape[0]))
        for start in range(0, flat.shape[1], step):
            part = scratch.doubles(block[:, start : start + step])
            out[place, :, start : start + step] = weights @ part
    return out.view(len(blocks), vectors.shape[0], *rows.shape[1:])


def over_weights(
    fold: Callable[[Tensor, Tensor], Tensor], w: Tensor, vectors: Tensor, kept: int | None, moduli: Moduli
) -> Tensor:
    """fold(w, vectors), one of an op's fold_weight_*, reduced: (modulus, rep, channel, ...).

    kept: the axis of w that is not summed and may be cut, or None.
    """
    limbs = _limbs(largest_of(vectors), largest_of(w) * vectors.shape[1])
    digits = torch.cat(split(vectors, limbs))
    parts = (w,) if kept is None else torch.split(w, max(1, _CHUNK * w.shape[kept] // max(1, w.numel())), dim=kept)
    folded = torch.cat([fold(scratch.doubles(part), digits) for part in parts], dim=1)
    return moduli.recombined(folded.unflatten(0, (limbs.count, -1)).unsqueeze(1).unbind(0), limbs)


# --- further sums, over what is left ----------------------------------------------------------------------------------
def contracted(values: Tensor, matrix: Tensor, moduli: Moduli) -> Tensor:
    """(block, rep, any, n) and (rep, n, m) -> (modulus, rep, any, m): sums over blocks and n of exact integers."""
    blocks, length = values.shape[0], values.shape[-1]
    largest = largest_of(values) * blocks
    if largest * length <= _ROOM:
        limbs = _limbs(largest_of(matrix), largest * length)
        partials = torch.matmul(_total(values), torch.cat(split(matrix, limbs), dim=-1)).split(matrix.shape[-1], dim=-1)
    else:
        limbs = _limbs(largest / max(1, blocks), largest_of(matrix.abs().sum(1)) * blocks)
        partials = tuple(torch.matmul(_total(digit), matrix) for digit in split(values, limbs))
    return moduli.recombined([partial.unsqueeze(0) for partial in partials], limbs)


def contracted_again(values: Tensor, matrix: Tensor, moduli: Moduli) -> Tensor:
    """(modulus, rep, any, n), reduced, and (rep, n, m) or (modulus, rep, n, m) -> (modulus, rep, any, m)."""
    total: Tensor | None = None
    for some, rows in zip(
        torch.split(values, _LONGEST, dim=-1), torch.split(matrix, _LONGEST, dim=-2), strict=True
    ):
        limbs = _limbs(largest_of(rows), moduli.half * some.shape[-1])
        partials = torch.matmul(some, torch.cat(split(rows, limbs), dim=-1)).split(matrix.shape[-1], dim=-1)
        part = moduli.recombined(partials, limbs)
        total = part if total is None else moduli.reduced(total + part)
    assert total is not None
    return total


def joined(blocks: Tensor, moduli: Moduli) -> Tensor:
    """(block, ...) -> (modulus, ...): sums over blocks, reduced."""
    if blocks.shape[0] == 1:
        return moduli.reduced(blocks)
    if largest_of(blocks) * blocks.shape[0] * _SLACK <= EXACT:
        return moduli.reduced(blocks.sum(0, keepdim=True))
    total = moduli.reduced(blocks[:1])
    for block in blocks[1:]:
        total = moduli.reduced(total + moduli.reduced(block.unsqueeze(0)))
    return total


def largest_of(values: Tensor) -> float:
    """The largest magnitude; not a number when one of the values is not."""
    if not values.numel():
        return 0.0
    lowest, highest = (float(value) for value in values.aminmax())
    return abs(lowest) if abs(lowest) > highest else abs(highest)  # either keeps what is not a number


def _limbs(bound: float, reach: float) -> Limbs:
    """limbs_for; what is not finite needs none, since it is refused whatever is computed with it."""
    return limbs_for(bound, reach * _SLACK) if math.isfinite(bound * reach) else Limbs(1, 1)


def _total(blocks: Tensor) -> Tensor:
    return blocks.sum(0) if blocks.shape[0] > 1 else blocks[0]
