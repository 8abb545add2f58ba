"""What an attack found: one number with its interval, and whether it is as it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Must(StrEnum):
    """What an attack has to do for the audit to pass. SHOW: nothing; it is there to be seen."""

    FAIL = "must fail"
    SUCCEED = "must succeed"
    SHOW = "shown"


class Outcome(StrEnum):
    """Which side of the threshold the whole interval lies on."""

    FAILED = "failed"
    SUCCEEDED = "succeeded"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG with a title above it and a caption below it."""

    title: str
    caption: str
    png: bytes


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How well one attack did against one target. More is better for the attacker.

    target: what was attacked, in words. control: a deliberately broken scheme, which shows that the attack works.
    measure: what the number is. low, high: its 95 % interval. guessing: what somebody who knows nothing reaches.
    threshold: between guessing and what a working attack reaches. words: one or two sentences for a reviewer.

    An attack has succeeded if its interval lies above the threshold, and failed if it lies below. An interval on both
    sides decides nothing, and counts for neither: an attack that must fail has not been seen to.
    """

    target: str
    must: Must
    control: bool
    measure: str
    value: float
    low: float
    high: float
    guessing: float
    threshold: float
    words: str
    details: Mapping[str, float | int | str] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.value, self.low, self.high, self.guessing, self.threshold)
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"{self.target}: a number that is not finite compares with nothing.")
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.target}: the value lies outside its interval.")
        if self.threshold < self.guessing:
            raise ValueError(f"{self.target}: a threshold below guessing, which everybody would pass.")

    @property
    def outcome(self) -> Outcome:
        if self.low > self.threshold:
            return Outcome.SUCCEEDED
        return Outcome.FAILED if self.high <= self.threshold else Outcome.UNDECIDED

    @property
    def succeeded(self) -> bool:
        return self.outcome is Outcome.SUCCEEDED

    @property
    def as_it_must(self) -> bool:
        match self.must:
            case Must.FAIL:
                return self.outcome is Outcome.FAILED
            case Must.SUCCEED:
                return self.outcome is Outcome.SUCCEEDED
            case Must.SHOW:
                return True

    @property
    def guessing_inside(self) -> bool:
        """The interval cannot tell the attack from guessing."""
        return self.low <= self.guessing <= self.high
