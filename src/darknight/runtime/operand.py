"""What goes into the products of a layer call in the field, and what comes out: integers, and the scale they are in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from darknight.coding import MaskedShares, Mixing, virtual_batches
from darknight.coding import field as coding
from darknight.coding.fixed_point import checksum, dequantise, quantise_nearest, quantise_stochastic
from darknight.errors import EncodingError
from darknight.integrity import Integers, Rounded, Weighed
from darknight.randomness import Rounding, Stream, words_of

_CHANGED = (
    "its input was overwritten while workers computed with it, so that no share of it can be made again. Let nobody "
    "write to a batch before the layer has returned."
)


@dataclass(eq=False)
class Operand:
    """A batch times 2^exponent, rounded: to nearest, or by `rounding` at random. largest: of the values' magnitudes.

    It is quantised when it is masked, in the same pass. What is rounded to nearest is rounded again where it is read,
    rather than written down; the integers are there for whoever asks for them. first: the place of its examples in the
    batch that it is a part of.
    """

    values: Tensor
    exponent: int
    largest: float
    rounding: Rounding | None = None
    _integers: Tensor | None = field(default=None, repr=False)
    first: int = 0
    _parts: list[Operand] = field(default_factory=list, repr=False)
    _checksum: int | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def part(self, examples: slice) -> Operand:
        """Some of its examples."""
        if self.values.dtype != torch.float32:
            self.integers  # noqa: B018 - once, for all parts
        integers = None if self._integers is None else self._integers[examples]
        before = examples.start * math.prod(self.shape[1:])
        rounding = None if self.rounding is None else self.rounding.after(before)
        values, first = self.values[examples], self.first + examples.start
        part = Operand(values, self.exponent, self.largest, rounding, integers, first)
        self._parts.append(part)
        return part

    @property
    def integers(self) -> Tensor:
        if self._integers is None:
            if self.rounding is None:
                self._integers = quantise_nearest(self.values, self.exponent)
            else:
                words = words_of(self.rounding, self.shape)
                self._integers = quantise_stochastic(self.values, self.exponent, words)
        return self._integers

    @property
    def numbers(self) -> Integers:
        """What the integers are, for a check, which reads them once."""
        if self._integers is None and self.rounding is None and self.values.dtype == torch.float32:
            return Rounded(self.values, self.exponent)
        return self.integers

    @property
    def checksum(self) -> int:
        """Of the integers of a whole batch: as found while they were masked, where they were; else they are read."""
        parts = self._parts or [self]
        known = [part._checksum for part in parts if part._checksum is not None]
        if len(known) == len(parts) and sum(len(part.values) for part in parts) == len(self.values):
            return sum(known) % 2**64
        numbers = self.numbers
        return checksum(numbers.values, numbers.exponent) if isinstance(numbers, Rounded) else checksum(numbers)

    def shares(self, mixing: Mixing, prime: int, stream: Stream, rooms: Mapping[int, Tensor]) -> MaskedShares:
        """By worker, (group, *feature), masked with noise from `stream`; in its room, if there is one and it can be."""
        if self._integers is not None or self.values.dtype != torch.float32:
            return coding.encode_shares(mixing, virtual_batches(self.integers, mixing.inputs), prime, stream)
        bound = math.floor(self.largest * 2.0**self.exponent) + 1
        shares, (self._integers, self._checksum) = coding.encode_values(
            mixing,
            self.values,
            self.exponent,
            self.rounding,
            largest=bound,
            prime=prime,
            stream=stream,
            keep=self.rounding is not None,
            row=self.first,
            rooms=rooms,
        )
        return shares

    @property
    def masked_checksum(self) -> int:
        """Of these examples, at their places in the batch."""
        return self._read_again() if self._checksum is None else self._checksum

    def _read_again(self) -> int:
        before = self.integers.new_zeros(self.first, *self.shape[1:])
        return checksum(torch.cat([before, self.integers]))

    def share(self, mixing: Mixing, prime: int, stream: Stream, worker: int, *, masked: int | None = None) -> Tensor:
        """One of them again, from the same noise. Raises EncodingError if it would be another one.

        Under the same noise, two different shares would tell whoever gets both of them what the difference is.
        masked: `masked_checksum` when they were masked, if that was another operand of the same values.
        """
        known = self._checksum if masked is None else masked
        if known is not None and self._read_again() != known:
            raise EncodingError(_CHANGED)
        groups = virtual_batches(self.integers, mixing.inputs)
        return coding.encode(mixing, groups, prime, stream, rows=[worker])[0]


@dataclass(eq=False, slots=True)
class Product:
    """Integers times 2^-exponent. floats: the same as float32, where they were made with the integers, or instead.

    weighed: what is left of the integers for the check, where there are none. finished: the floats have had their bias
    and activation.
    """

    integers: Tensor | None
    exponent: int
    floats: Tensor | None = field(default=None, repr=False)
    weighed: Weighed | None = field(default=None, repr=False)
    finished: bool = False

    @classmethod
    def of(cls, integers: Tensor, floats: Tensor, exponent: int) -> Product:
        return cls(integers, exponent, floats)

    @property
    def whole(self) -> Tensor:
        """The integers, of a product that has them."""
        assert self.integers is not None
        return self.integers

    def to(self, dtype: torch.dtype) -> Tensor:
        if self.floats is not None and dtype == torch.float32:
            return self.floats
        if self.integers is None:  # then operands are float32, and nobody expects more of the result
            assert self.floats is not None
            return self.floats.to(dtype)
        return dequantise(self.integers, self.exponent, dtype)
