"""Taking the steps of a forward that was read, with layers finished by what is known to get their results.

Every step is Python's own, in its order, with two exceptions. A batch normalisation may add what its result is added to
next, and then the sum is not computed again; for that, what the sum needs of torch's own layers is computed before the
normalisation instead of behind it. And what stands behind a layer is told to it (nn.behind): whether it can be done at
once is asked there, in every call, by the same rules as in a Sequential.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from darknight.nn.behind import NORMS, Addend, Next, Sequence, sees_all, unseen
from darknight.nn.pooling import window_of
from darknight.nn.staying import Staying, limits_of
from darknight.nn.steps import Call, Chain, Check, Constant, Known, Method, Own, Path, Reading, Step, Sum, Taker

MARK = "_darknight"  # where a protected module has what it remembers

_NOT_YET = object()
# Of torch's layers: some that change nothing but statistics of their own, and look at nothing but their input.
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Identity, nn.AvgPool2d, *NORMS)

# What can be finished with what stands behind it; a layer of these ends what can be finished, except for a
# normalisation right behind the layer, to which nothing is added.
_FINISHED = (nn.modules.conv._ConvNd, nn.Linear, nn.Sequential, *NORMS)


def holds(reading: Reading, module: nn.Module, given: tuple[Any, ...]) -> bool:
    """Whether calling a module's forward with these arguments would take the steps that were read, and no others."""
    kind, function = type(module), reading.function
    if kind.forward is not function or function.__code__ is not reading.code or len(given) != reading.arguments:
        return False
    if kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__:
        return False
    if _debugged():
        return False
    own, modules = vars(module), module._modules
    for name in reading.names:
        if hasattr(kind, name) or (name in own) == (name in modules):
            return False
    for name in reading.flags:
        if type(own.get(name)) is not bool:
            return False
    if not reading.path(module).called.isdisjoint(own):
        return False
    return all(step.found(function.__globals__) is expected for step, expected in reading.functions.items())


def _debugged() -> bool:
    """Whether somebody may stop in the forward and look around."""
    monitoring = getattr(sys, "monitoring", None)
    return sys.gettrace() is not None or bool(monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID))


class Following:
    """One call of a forward. mode: the one that sees the functions of the model."""

    def __init__(self, reading: Reading, module: nn.Module, sequence: Sequence, at_home: Staying, mode: object) -> None:
        self._reading = reading
        self._module = module
        self._sequence = sequence
        self._at_home = at_home
        self._mode = mode
        self._path: Path = reading.path(module)
        self._values: list[Any] = []

    def run(self, given: tuple[Any, ...]) -> Any:
        """What the forward returns."""
        self._values = [*given, *[_NOT_YET] * len(self._path.steps)]
        place = 0
        while place < len(self._path.steps):
            step, value = self._path.steps[place], len(given) + place
            if isinstance(step, Check):
                if not step.holds(self._module):  # a module that was called has changed it
                    self._turn(place, not step.answer)
            elif self._values[value] is _NOT_YET:
                self._values[value] = self._result(place, step)
            place += 1
        return self._values[self._path.returned]

    def _turn(self, place: int, answer: bool) -> None:
        """Goes on with another path, which is the same up to here."""
        self._path = self._reading.path(self._module, (*self._path.decided(place), answer))
        known = self._values[: self._path.arguments + place]
        self._values = [*known, *[_NOT_YET] * (len(self._path.steps) - place)]

    def _result(self, place: int, step: Step) -> Any:
        values = self._values
        if isinstance(step, Own):
            return getattr(self._module, step.name)
        if isinstance(step, Call):
            chain = self._reading.chains.get((self._path, place))
            function = values[step.function]
            if chain is not None and isinstance(function, _FINISHED):
                return self._call(chain, function, values[step.given[0]])
            if not step.named and len(step.given) == 1:
                return function(values[step.given[0]])
            named = {name: values[each] for name, each in step.named}
            return function(*[values[each] for each in step.given], **named)
        if isinstance(step, Sum):
            total = values[step.left]
            if not step.in_place:
                return total + values[step.right]
            total += values[step.right]
            return total
        if isinstance(step, Known):
            return step.found(self._reading.function.__globals__)
        if isinstance(step, Method):
            return getattr(values[step.value], step.name)
        assert isinstance(step, Constant), "a check gives nothing"
        return step.value

    # --- a module, and who gets its result ----------------------------------------------------------------------------
    def _call(self, chain: Chain, module: nn.Module, input: Any) -> Any:
        if chain.checks and not all(check.holds(self._module) for check in chain.checks):
            return module(input)
        now: list[Next] = [module]
        addend = None
        if chain.sum is not None:
            if not self._prepared(chain, module) or not isinstance(other := self._values[chain.other], Tensor):
                return module(input)
            addend = Addend(other)
            now.append(addend)
        for taker in chain.takers:
            following = self._following(taker)
            first = len(now) == 1 and isinstance(following, NORMS) and not chain.added
            if following is None or (isinstance(following, _FINISHED) and not first):
                break
            now.append(following)
        if len(now) == 1:
            return module(input)
        result = self._sequence.call(now, input, self._mode)
        if chain.sum is not None and addend is not None and addend.taken:
            self._values[self._path.arguments + chain.sum] = result
        return result

    def _following(self, taker: Taker) -> Next | None:
        """What is called further on; None if it is not known what that does."""
        function = self._values[taker.function]
        if function is _NOT_YET:
            function = self._result(taker.function - self._path.arguments, taker.step)
        if isinstance(function, nn.Module):
            return None if taker.rest or taker.named else function
        if function is F.max_pool2d:
            return window_of(*taker.rest, **taker.named)
        return limits_of(function, *taker.rest, **taker.named)

    def _prepared(self, chain: Chain, module: nn.Module) -> bool:
        """Takes the steps before a sum, if nobody can see that they were taken before the module was called."""
        if not chain.moved:
            return True
        steps = [(place, self._path.steps[place]) for place in chain.moved]
        if not sees_all(self._mode):
            return False
        for _, step in steps:
            if isinstance(step, Call):
                function = self._path.made(step.function)
                other = getattr(self._module, function.name) if isinstance(function, Own) else None
                if len(step.given) != 1 or step.named or not _indifferent(other, module):
                    return False
            elif not isinstance(step, Own | Known | Constant):
                return False
        with self._at_home.aside():
            for place, step in steps:
                self._values[self._path.arguments + place] = self._result(place, step)
        return True


def _indifferent(module: object, norm: nn.Module) -> bool:
    """Whether it makes no difference if a module is called before a batch normalisation or after it."""
    if type(norm) not in NORMS or "forward" in vars(norm) or not unseen(norm):
        return False
    if not isinstance(module, nn.Module) or not unseen(module):
        return False
    binding, forward = vars(module).get(MARK), vars(module).get("forward")
    if forward is not None and (binding is None or forward is not binding.forward):
        return False
    if type(module) is nn.Sequential:
        return all(_indifferent(each, norm) for each in module)
    shared = {id(each) for each in norm.buffers()} & {id(each) for each in module.buffers()}
    return type(module) in _LAYERS and module is not norm and not shared
