"""Exact sums weighed with random vectors, for Freivalds' check in the field.

Large tensors are summed in float64, and every such sum stays within 2^53, so none is rounded: it is cut into *blocks*
so short that operands of magnitude p/2 fit. What is left is a fraction of the tensor. The next sum over it is made from
balanced digits of whichever operand is cheaper to split (ops.field.split), and reduced. What is left then is small, and
summed in int64 by numpy, whose calls cost less than torch's.

Axes: `block` and `rep`; `modulus` for what is reduced modulo each of the primes of `Moduli`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darknight.kernels import weigh
from darknight.ops import BilinearOp
from darknight.ops.field import EXACT, Limbs, limbs_for, split

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Sums are kept this little below 2^53, because reduction needs the multiple of the prime next to a sum to be exact too.
_SLACK = 1 + 2.0**-24
_SHIFT = 24  # bits by which a centred value, of 27, is shifted at most: adding a sum up to 2^52 is exact
_ROOM = 2.0**44  # sums of the larger operand up to here leave the digits of the smaller one 9 bits or more
_INTEGERS = 1 << 62  # sums in int64 stay below
_LONGEST = 1 << 16  # terms of a sum in float64 of products of two residues: 27 + 16 bits leave a digit 9


class Moduli:
    """One or two primes below 2^28, and reduction modulo all of them at once."""

    def __init__(self, primes: Sequence[int]) -> None:
        self.half = float(max(primes) // 2 + 8)  # what a centred value is at most
        self._primes = np.array(primes)
        self._floats = self._primes.astype(np.float64)
        self._inverse = 1.0 / self._floats

    def __len__(self) -> int:
        return len(self._primes)

    def centred(self, values: Floats) -> Floats:
        """Exact (modulus, ...) or (1, ...) -> (modulus, ...): as ops.field.centred, modulo each prime."""
        axes = (-1, *(1,) * (values.ndim - 1))
        multiples = values * self._inverse.reshape(axes)
        np.rint(multiples, out=multiples)
        np.multiply(multiples, self._floats.reshape(axes), out=multiples)
        return np.subtract(values, multiples, out=multiples)

    def centred_rows(self, rows: Tensor) -> Tensor:
        """Exact float64 (modulus * row, ...) -> the same, centred."""
        whole = rows.numpy().reshape(len(self), -1, *rows.shape[1:])
        return torch.from_numpy(self.centred(whole).reshape(rows.shape))

    def residues(self, values: Integers) -> Integers:
        """(modulus, ...) or (1, ...) -> (modulus, ...), in [0, prime)."""
        reduced: Integers = np.remainder(values, self._primes.reshape(-1, *(1,) * (values.ndim - 1)))
        return reduced

    def recombined(self, partials: Floats, limbs: Limbs) -> Integers:
        """sum of partial_i * 2^(bits * i), each at most 2^52: (modulus or 1, limb, ...) -> centred (modulus, ...)."""
        total = self.centred(partials[:, -1])
        for place in reversed(range(limbs.count - 1)):
            bits = limbs.bits
            if bits > _SHIFT:
                total, bits = self.centred(total * 2.0 ** (bits - _SHIFT)), _SHIFT
            total = self.centred(total * 2.0**bits + partials[:, place])
        return total.astype(np.int64)


# --- first sums, over large tensors -----------------------------------------------------------------------------------
def block_length(largest: float, entry: float) -> int:
    """How many products of values up to `largest` with entries up to `entry` can be summed exactly."""
    return max(1, int(EXACT // (largest * entry * _SLACK)))


def over_channels(rows: Tensor, vectors: Tensor, groups: int, longest: int) -> Tensor:
    """(row, channel, ...) and (rep, channel) -> (block, row, group * rep, ...): sums over at most `longest` channels.

    A block is the same part of every group.
    """
    count, channels, *sizes = rows.shape
    sums = weigh(rows.reshape(count, channels, prod(sizes)), vectors, longest, groups)
    return sums.view(len(sums), count, groups * len(vectors), *sizes)


def over_rows(rows: Tensor, vectors: Tensor, longest: int) -> Tensor:
    """(row, ...) and (rep, row) -> (block, rep, ...): sums over at most `longest` rows."""
    count, *sizes = rows.shape
    sums = weigh(rows.reshape(1, count, prod(sizes)), vectors, longest)
    return sums.view(len(sums), len(vectors), *sizes)


def over_weights(op: BilinearOp, w: Tensor, vectors: Tensor, axis: int, longest: int, moduli: Moduli) -> Integers:
    """w and (rep, channel) -> (modulus, rep, other channel, ...), centred: sums over outputs (axis 0) or inputs (1)."""
    if op.groups > 1:
        fold = op.fold_weight_input if axis else op.fold_weight_output
        limbs = _limbs(largest_of(vectors), largest_of(w) * vectors.shape[1])
        folded = fold(w.to(torch.float64), torch.cat(split(vectors, limbs))).numpy()
        return moduli.recombined(folded.reshape(1, limbs.count, -1, *folded.shape[1:]), limbs)
    if axis == op.output_axis:
        blocks = over_rows(w, vectors, longest)
    else:
        blocks = over_channels(w, vectors, 1, longest).transpose(1, 2)
    return joined(blocks, moduli).astype(np.int64)


# --- further sums, over what is left ----------------------------------------------------------------------------------
def contracted(matrix: Tensor, values: Tensor, moduli: Moduli, largest: float) -> Integers:
    """(rep, m, n) and exact (block, rep, n, any), both float64 -> (modulus, rep, m, any): sums, centred.

    largest: the largest magnitude of a value.
    """
    if largest * len(values) <= EXACT:  # what is split below is less
        values, largest = _total(values).unsqueeze(0), largest * len(values)
    blocks, length = values.shape[0], values.shape[-2]
    if blocks == 1 and largest * length <= _ROOM:
        limbs = _limbs(largest_of(matrix), largest * length)
        products = torch.matmul(torch.cat(split(matrix, limbs), dim=-2), values[0]).numpy()
        partials = np.moveaxis(products.reshape(matrix.shape[0], limbs.count, matrix.shape[1], -1), 1, 0)
    else:
        limbs = _limbs(largest, largest_of(matrix.abs().sum(-1)) * blocks)
        partials = np.stack([torch.matmul(matrix, _total(digit)).numpy() for digit in split(values, limbs)])
    return moduli.recombined(partials[np.newaxis], limbs)


def contracted_again(matrix: Integers, values: Integers, moduli: Moduli) -> Integers:
    """Any (rep, ..., m, n), reduced (modulus, rep, ..., n, any) -> residues (modulus, rep, ..., m, any)."""
    length = values.shape[-2]
    longest = max(1, _INTEGERS // (int(np.abs(matrix).max(initial=1)) << 28))
    if length <= longest:
        return moduli.residues(matrix @ values)
    steps = (slice(start, start + longest) for start in range(0, length, longest))
    parts = [moduli.residues(matrix[..., step] @ values[..., step, :]) for step in steps]
    return moduli.residues(np.sum(parts, axis=0))


def inner_product(left: Integers, right: Integers, moduli: Moduli) -> Integers:
    """(modulus, rep, n) twice, of magnitude below the primes -> (modulus, rep), below 2^28 n."""
    total: Integers = moduli.residues(left * right).sum(2)
    return total


def inner_product_of_rows(left: Tensor, right: Tensor, moduli: Moduli) -> Integers:
    """Centred float64 (modulus * row, channel, ...) twice -> (modulus, channel), of magnitude below 2^27 rows."""
    left, right = (each.view(len(moduli), -1, *each.shape[1:]) for each in (left, right))
    if left.dim() == 3:  # no further axes: let the rows be one
        left, right = (each.transpose(1, 2).unsqueeze(1) for each in (left, right))
    left, right = left.flatten(3), right.flatten(3)
    total = np.zeros((len(moduli), left.shape[2]), dtype=np.int64)
    for start in range(0, left.shape[3], _LONGEST):
        a, b = (each[..., start : start + _LONGEST] for each in (left, right))
        limbs = _limbs(moduli.half, moduli.half * a.shape[-1])
        partials = np.stack([torch.linalg.vecdot(digit, b).numpy() for digit in split(a, limbs)], axis=1)
        total += moduli.recombined(partials, limbs).sum(1)
    return total


def joined(blocks: Tensor, moduli: Moduli) -> Floats:
    """Exact float64 (block, ...) -> (modulus, ...): sums over the blocks, centred."""
    whole = blocks.numpy()
    if len(whole) == 1:
        return moduli.centred(whole)
    if largest_of(blocks) * len(whole) * _SLACK <= EXACT:
        return moduli.centred(whole.sum(0, keepdims=True))
    total = moduli.centred(whole[:1])
    for block in whole[1:]:
        total = moduli.centred(total + moduli.centred(block[np.newaxis]))
    return total


def integers(entries: Tensor) -> Integers:
    """float64 -> int64."""
    whole: Integers = entries.numpy().astype(np.int64)
    return whole


def largest_of(values: Tensor) -> float:
    """The largest magnitude."""
    return max(abs(float(value)) for value in values.aminmax()) if values.numel() else 0.0


def _limbs(bound: float, reach: float) -> Limbs:
    """Digits of values up to `bound` whose sums stay within 2^52."""
    return limbs_for(bound, 2 * reach)


def _total(blocks: Tensor) -> Tensor:
    return blocks.sum(0) if blocks.shape[0] > 1 else blocks[0]
