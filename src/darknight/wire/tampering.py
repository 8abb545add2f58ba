"""What a lie does to a tensor. Whatever is altered is a new tensor: the worker's own stays as it is.

The numbers that a liar needs follow from a text by SHAKE-256, so that several workers can tell the same lie, and a test
the same one twice. They hide nothing and mask nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from fractions import Fraction

import torch
from torch import Tensor

from darknight.wire.plan import Lie

_LARGEST = (1 << 31) - 1  # outside of every field that fits int32
_UNIFORM = 53  # bits


class Dice:
    """Numbers that follow from `parts`: the same parts, the same numbers."""

    def __init__(self, *parts: object) -> None:
        self._seed = json.dumps(parts).encode()

    def number(self, below: int) -> int:
        return int.from_bytes(self._bytes("number", 16), "little") % below

    def residues(self, like: Tensor, prime: int) -> Tensor:
        """Uniform in [0, prime), up to a bias that nobody needs to mind here."""
        return self._words("residues", like.numel()).remainder(prime).to(like.dtype).reshape(like.shape)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal, by Box and Muller."""
        mask = (1 << _UNIFORM) - 1
        radius = (self._words("radius", like.numel()).bitwise_and(mask) + 1).double() / (1 << _UNIFORM)
        angle = self._words("angle", like.numel()).bitwise_and(mask).double() / (1 << _UNIFORM)
        values = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
        return values.to(like.dtype).reshape(like.shape)

    def _words(self, purpose: str, count: int) -> Tensor:
        content = bytearray(self._bytes(purpose, 8 * count))
        return torch.frombuffer(content, dtype=torch.int64) if content else torch.empty(0, dtype=torch.int64)

    def _bytes(self, purpose: str, count: int) -> bytes:
        return hashlib.shake_256(purpose.encode() + b" of " + self._seed).digest(count)


Tamper = Callable[[Tensor, int, Dice, Lie], Tensor]  # the tensor, its prime (floats: any), numbers, the plan


def tampered(tensor: Tensor, prime: int | None, dice: Dice, lie: Lie) -> Tensor | None:
    """A tensor of the same shape and dtype, with the lie in it; None if there is nothing that could be altered.

    Whole numbers are residues of `prime`, whatever the caller knows about them.
    """
    if not tensor.numel():
        return None
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return different(tensor, TAMPERINGS[lie.attack](copy, prime or _LARGEST, dice, lie))


def different(true: Tensor, other: Tensor) -> Tensor | None:
    """`other`, or None if it says the same: that would be no lie."""
    return None if torch.equal(true, other) else other


def weights_altered(tensor: Tensor, prime: int | None, dice: Dice, size: float | None) -> Tensor | None:
    """One element a step off: 1 in whole numbers, and a tenth of the largest one, or `size`, in floats."""
    if not tensor.numel():
        return None
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = copy.view(-1)
    index = dice.number(len(flat))
    if copy.is_floating_point():
        largest = float(tensor.abs().max())
        flat[index] += size or largest / 10 or 1.0
    else:  # weights have signs, and stay below the prime
        flat[index] += 1 if int(flat[index]) + 1 < (prime or _LARGEST) else -1
    return different(tensor, copy)


# --- each of these may change the tensor that it is given -------------------------------------------------------------
def _one_element(tensor: Tensor, prime: int, dice: Dice, lie: Lie) -> Tensor:
    flat = tensor.view(-1)
    index = dice.number(len(flat))
    if not tensor.is_floating_point():
        flat[index] = (int(flat[index]) + 1) % prime
    elif lie.size is not None:
        flat[index] += lie.size
    else:
        flat[index] = torch.nextafter(flat[index], torch.full_like(flat[index], math.inf))
    return tensor


def _sign(tensor: Tensor, prime: int, dice: Dice, lie: Lie) -> Tensor:
    flat = tensor.view(-1)
    places = flat.nonzero().flatten()  # minus zero is zero
    if len(places):
        index = int(places[dice.number(len(places))])
        flat[index] = -flat[index] if tensor.is_floating_point() else prime - int(flat[index])
    return tensor


def _row(tensor: Tensor, prime: int, dice: Dice, lie: Lie) -> Tensor:
    rows = tensor.view(len(tensor), -1) if tensor.dim() else tensor.view(1, 1)
    row = rows[dice.number(len(rows))]
    row.copy_(dice.normal(row) * _rms(row) if tensor.is_floating_point() else dice.residues(row, prime))
    return tensor


def _noise(tensor: Tensor, prime: int, dice: Dice, lie: Lie) -> Tensor:
    if tensor.is_floating_point():
        return tensor.add_(dice.normal(tensor), alpha=lie.size or _rms(tensor))
    return dice.residues(tensor, prime)


def _scale(tensor: Tensor, prime: int, dice: Dice, lie: Lie) -> Tensor:
    return _times(tensor, Fraction(2) if lie.factor is None else lie.factor, prime)


def _zeros(tensor: Tensor, prime: int, dice: Dice, lie: Lie) -> Tensor:
    return tensor.zero_()


def _nan(tensor: Tensor, prime: int, dice: Dice, lie: Lie) -> Tensor:
    tensor.view(-1)[dice.number(tensor.numel())] = math.nan if tensor.is_floating_point() else _LARGEST
    return tensor


def _infinity(tensor: Tensor, prime: int, dice: Dice, lie: Lie) -> Tensor:
    tensor.view(-1)[dice.number(tensor.numel())] = math.inf if tensor.is_floating_point() else -1
    return tensor


def _coordinated(tensor: Tensor, prime: int, dice: Dice, lie: Lie) -> Tensor:
    factor = Fraction(1) if lie.factor is None else lie.factor
    if tensor.is_floating_point():
        return tensor.add_(dice.normal(tensor), alpha=float(factor) * (lie.size or 1.0))
    added = _times(dice.residues(tensor, prime), factor, prime)
    return tensor.long().add_(added).remainder_(prime).to(tensor.dtype)


def _times(tensor: Tensor, factor: Fraction, prime: int) -> Tensor:
    if tensor.is_floating_point():
        return tensor * float(factor)
    if factor.denominator % prime == 0:  # a tiny field has no such fraction
        return tensor
    residue = factor.numerator * pow(factor.denominator, -1, prime) % prime
    return (tensor.long() * residue).remainder_(prime).to(tensor.dtype)


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) or 1.0


TAMPERINGS: Mapping[str, Tamper] = {
    "one-element": _one_element,
    "sign": _sign,
    "row": _row,
    "noise": _noise,
    "scale": _scale,
    "zeros": _zeros,
    "nan": _nan,
    "infinity": _infinity,
    "coordinated": _coordinated,
}
