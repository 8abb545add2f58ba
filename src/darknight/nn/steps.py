"""The steps of a forward that was read: every one that Python would take, in its order, and who uses what it gives.

Values have numbers: first the arguments of forward behind self, then what each step gives, a `Check` too, which gives
nothing. A forward that asks something has several paths, which are the same until they answer differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

import torch

Decisions = tuple[bool, ...]
_MOST_CALLS = 3  # behind a layer: a normalisation, an activation and a pooling


@dataclass(frozen=True)
class Constant:
    value: Any


@dataclass(frozen=True)
class Own:
    """self.name"""

    name: str


@dataclass(frozen=True)
class Known:
    """A function of torch, by the names that lead to it from the globals of the forward."""

    names: tuple[str, ...]

    def found(self, names: Mapping[str, Any]) -> Any:
        value = names.get(self.names[0])
        for name in self.names[1:]:
            value = getattr(value, name, None)
        return value


@dataclass(frozen=True)
class Method:
    """Of a value."""

    value: int
    name: str


@dataclass(frozen=True)
class Call:
    function: int
    given: tuple[int, ...]
    named: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Sum:
    left: int
    right: int
    in_place: bool = False


@dataclass(frozen=True)
class Condition:
    """self.name, or self.name is None."""

    name: str
    is_none: bool

    def holds(self, module: object) -> bool:
        value = getattr(module, self.name)
        return value is None if self.is_none else bool(value)


@dataclass(frozen=True)
class Check:
    """Here the forward asks; on this path the answer is so."""

    condition: Condition
    answer: bool

    def holds(self, module: object) -> bool:
        return self.condition.holds(module) == self.answer


Step = Constant | Own | Known | Method | Call | Sum | Check


def operands(step: Step) -> tuple[int, ...]:
    """The values that a step uses."""
    if isinstance(step, Call):
        return (step.function, *step.given, *(value for _, value in step.named))
    if isinstance(step, Sum):
        return (step.left, step.right)
    return (step.value,) if isinstance(step, Method) else ()


@dataclass(frozen=True, eq=False)
class Taker:
    """A call of what another one gave, and of constants: the value of its function, and the step that makes that."""

    function: int
    step: Own | Known
    rest: tuple[Any, ...]
    named: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Chain:
    """Who gets what a call gave, and nobody else: a sum with the value `other`, or none, and then some calls in turn.

    sum: the place of that step. moved: those of the steps before it, of which it needs some. checks: all that is asked
    on the way. added: whether a sum comes behind the one call that there is. Between the sum, or the first call if
    there is none, and the last of `takers` nothing is computed.
    """

    sum: int | None
    other: int
    moved: tuple[int, ...]
    takers: tuple[Taker, ...]
    checks: tuple[Check, ...]
    added: bool


@dataclass(frozen=True, eq=False)
class Path:
    """One way through a forward, and the value that is returned."""

    arguments: int
    steps: tuple[Step, ...]
    returned: int

    def made(self, value: int) -> Step | None:
        """The step that gives a value; None for an argument."""
        return self.steps[value - self.arguments] if value >= self.arguments else None

    @cached_property
    def called(self) -> frozenset[str]:
        """Names of self that are called."""
        functions = [self.made(step.function) for step in self.steps if isinstance(step, Call)]
        return frozenset(function.name for function in functions if isinstance(function, Own))

    def decided(self, place: int) -> Decisions:
        """What was asked before this place, and answered."""
        return tuple(step.answer for step in self.steps[:place] if isinstance(step, Check))

    def uses(self, value: int) -> list[int]:
        """The places where a value is used, each as often as it is; behind the last step if it is returned."""
        found = [place for place, step in enumerate(self.steps) for each in operands(step) if each == value]
        return [*found, len(self.steps)] if value == self.returned else found


@dataclass(frozen=True, eq=False)
class Reading:
    """A forward that was read completely. asked: what it asks after these decisions; paths: where it asks no more."""

    function: FunctionType
    code: CodeType
    arguments: int
    asked: Mapping[Decisions, Condition]
    paths: Mapping[Decisions, Path]

    def path(self, module: object, decided: Decisions = ()) -> Path:
        """The one that a module takes as it is now, if it has decided so much already."""
        while (condition := self.asked.get(decided)) is not None:
            decided = (*decided, condition.holds(module))
        return self.paths[decided]

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of self that are looked at."""
        own = {step.name for step in self._steps if isinstance(step, Own)}
        return frozenset(own | {condition.name for condition in self.asked.values()})

    @cached_property
    def flags(self) -> frozenset[str]:
        """Those of them that are true or false."""
        return frozenset(condition.name for condition in self.asked.values() if not condition.is_none)

    @cached_property
    def functions(self) -> dict[Known, object]:
        """What the names of functions stood for when they were read."""
        known = {step for step in self._steps if isinstance(step, Known)}
        return {step: step.found(self.function.__globals__) for step in known}

    @cached_property
    def chains(self) -> Mapping[tuple[Path, int], Chain]:
        """Of each call of self.name(value), by its path and place; none if somebody else may use its result."""
        every = [(path, place) for path in self.paths.values() for place in range(len(path.steps))]
        found = {(path, place): self._chain(path, place) for path, place in every}
        return {key: chain for key, chain in found.items() if chain is not None}

    @property
    def _steps(self) -> Iterator[Step]:
        return (step for path in self.paths.values() for step in path.steps)

    def _chain(self, path: Path, place: int) -> Chain | None:
        step = path.steps[place]
        if not isinstance(step, Call) or not isinstance(path.made(step.function), Own):
            return None
        if len(step.given) != 1 or step.named:
            return None
        value, last = path.arguments + place, place
        sum_: int | None = None
        other, moved, takers, added = 0, tuple[int, ...](), list[Taker](), False
        while len(takers) < _MOST_CALLS and (following := self._only_use(path, value)) is not None:
            between, step = range(last + 1, following), path.steps[following]
            terms = self._terms(path, step)
            if terms is not None and last == place and (terms[0] == value or not _in_place(step)):
                other, sum_ = terms[1] if terms[0] == value else terms[0], following
                moved = tuple(each for each in between if not isinstance(path.steps[each], Check))
            else:
                taker = _taker(path, step, value)
                if taker is None or any(isinstance(path.steps[each], Call | Sum) for each in between):
                    added = terms is not None and len(takers) == 1
                    break
                takers.append(taker)
            value, last = path.arguments + following, following
        if last == place:
            return None
        checks = tuple(each for each in path.steps[place:last] if isinstance(each, Check))
        return Chain(sum_, other, moved, tuple(takers), checks, added)

    def _terms(self, path: Path, step: Step) -> tuple[int, int] | None:
        """The two values of a sum."""
        if isinstance(step, Sum):
            return step.left, step.right
        if isinstance(step, Call) and len(step.given) == 2 and not step.named:
            function = path.made(step.function)
            if isinstance(function, Known) and self.functions[function] is torch.add:
                return step.given[0], step.given[1]
        return None

    def _only_use(self, path: Path, value: int) -> int | None:
        """Where a value is used, if that is the only time, whatever is answered later; None too if it is returned."""
        places = path.uses(value)
        if len(places) != 1 or places[0] == len(path.steps):
            return None
        decided = path.decided(places[0])
        others = [other for decisions, other in self.paths.items() if decisions[: len(decided)] == decided]
        return places[0] if all(other.uses(value) == places for other in others) else None


def _taker(path: Path, step: Step, value: int) -> Taker | None:
    """A step that calls something known with a value and constants."""
    if not isinstance(step, Call) or step.given[:1] != (value,):
        return None
    function, rest = path.made(step.function), [path.made(each) for each in step.given[1:]]
    named = {name: path.made(each) for name, each in step.named}
    if not isinstance(function, Own | Known):
        return None
    if not all(isinstance(each, Constant) for each in (*rest, *named.values())):
        return None
    constants = tuple(each.value for each in rest if isinstance(each, Constant))
    by_name = {name: each.value for name, each in named.items() if isinstance(each, Constant)}
    return Taker(step.function, function, constants, by_name)


def _in_place(step: Step) -> bool:
    return isinstance(step, Sum) and step.in_place
