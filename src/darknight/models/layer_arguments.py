"""What an argument of a described layer may be: plain values within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Unfit(Exception):  # noqa: N818
    """A value that an argument does not take."""


class Argument(Protocol):
    @property
    def words(self) -> str:
        """What it takes, in the words of an error."""

    def read(self, value: object) -> object:
        """The value as torch takes it; Unfit for everything else."""


@dataclass(frozen=True)
class Count:
    least: int
    most: int

    @property
    def words(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def read(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            raise Unfit
        return value


@dataclass(frozen=True)
class Sizes:
    """One number for all axes, or one for each."""

    axes: int
    each: Count

    @property
    def words(self) -> str:
        return f"{self.each.words}, or a list of {self.axes} such"

    def read(self, value: object) -> int | tuple[int, ...]:
        if not isinstance(value, list | tuple):
            return self.each.read(value)
        if len(value) != self.axes:
            raise Unfit
        return tuple(self.each.read(one) for one in value)


@dataclass(frozen=True)
class Shape:
    """Of the last axes of a tensor."""

    most_axes: int
    each: Count

    @property
    def words(self) -> str:
        return f"{self.each.words}, or a list of 1 to {self.most_axes} such"

    def read(self, value: object) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            return (self.each.read(value),)
        if not 1 <= len(value) <= self.most_axes:
            raise Unfit
        return tuple(self.each.read(one) for one in value)


@dataclass(frozen=True)
class Number:
    least: float
    most: float

    @property
    def words(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.least <= value <= self.most:
            raise Unfit
        return float(value)


@dataclass(frozen=True)
class Flag:
    @property
    def words(self) -> str:
        return "true or false"

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise Unfit
        return value


@dataclass(frozen=True)
class Word:
    known: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"one of {', '.join(self.known)}"

    def read(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.known:
            raise Unfit
        return value


@dataclass(frozen=True)
class Padding:
    """Of a convolution: numbers, or a word."""

    sizes: Sizes
    word: Word

    @property
    def words(self) -> str:
        return f"{self.sizes.words}, or {self.word.words}"

    def read(self, value: object) -> object:
        return self.word.read(value) if isinstance(value, str) else self.sizes.read(value)


@dataclass(frozen=True)
class Layers:
    """Layers inside a layer. They are read where the limits are known: here is only that they are a list."""

    @property
    def words(self) -> str:
        return "a list of layers, at least one"

    def read(self, value: object) -> list[object]:
        if not isinstance(value, list | tuple) or not value:
            raise Unfit
        return list(value)
