"""A model from a description: plain values, as JSON and TOML have them, that name one layer after the other.

    {"layers": [
        {"type": "Conv2d", "in_channels": 1, "out_channels": 8, "kernel_size": 3, "padding": 1},
        {"type": "Residual", "layers": [{"type": "Conv2d", ...}, {"type": "ReLU"}]},
        {"type": "Flatten"},
        {"type": "Linear", "in_features": 512, "out_features": 10}]}

Arguments are torch's. Layers are numbered from 0 as in the model's state_dict, such as "1.layers.0.weight".

Guarantees: a description of a stranger is either refused with UsageError, before memory is taken for it, or makes a
    model of the layers in `LAYERS`, within the limits, that turns a batch of examples into (batch, classes). No name in
    it is looked up anywhere but in `LAYERS` (contract test: tests/models/test_described.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from darknight.errors import UsageError
from darknight.models.layer_arguments import Layers, Unfit
from darknight.models.layer_types import LAYERS, LayerType

# How many examples, and whether in training. Who takes examples for features fits one number of them at most; and some
# layers refuse a single one.
_TRIALS = ((2, True), (3, True), (1, False))
_MOST_AXES, _MOST_SIZE, _MOST_CLASSES = 4, 1 << 16, 1 << 24
_LONGEST = 60  # characters of a stranger's text that an error repeats
_LONGEST_COMPLAINT = 200  # of torch


@dataclass(frozen=True, kw_only=True)
class Limits:
    """layers: those inside others counted too. depth: of layers inside layers. values: all that the layers make of one
    example, which is what training keeps in memory."""

    layers: int = 1024
    depth: int = 8
    parameters: int = 1 << 28
    values: int = 1 << 27


LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class _Node:
    """One layer that was read: its place in the model, and its arguments, with nodes where layers are inside it."""

    place: str
    kind: str
    arguments: Mapping[str, Any]

    @property
    def type(self) -> LayerType:
        return LAYERS[self.kind]

    @property
    def inside(self) -> list[_Node]:
        """It, and all layers inside it."""
        lists = [value for value in self.arguments.values() if isinstance(value, list)]
        return [self, *(found for nodes in lists for node in nodes for found in node.inside)]

    def check_input(self, shape: tuple[int, ...]) -> None:
        axes, channels = self.type.axes, self.type.channels
        if axes is not None and len(shape) != axes + 2:
            raise UsageError(f"an input of {shape[1:]} an example; needs {axes + 1} numbers, channels and {axes} more")
        if channels is not None and shape[1] != self.arguments[channels]:
            raise UsageError(f"an input with {shape[1]} channels; its {channels} is {self.arguments[channels]}")


def build_described(
    description: object, *, shape: tuple[int, ...], classes: int, seed: int, limits: Limits = LIMITS
) -> nn.Module:
    """A new model whose initial weights, drawn as torch does it, depend on `seed` alone.

    shape: of one example. torch's global generator is left as it was.

    >>> model = build_described(
    ...     {"layers": [{"type": "Flatten"}, {"type": "Linear", "in_features": 12, "out_features": 5}]},
    ...     shape=(1, 3, 4), classes=5, seed=0,
    ... )
    >>> list(model.state_dict())
    ['1.weight', '1.bias']
    """
    check_description(description, shape=shape, classes=classes, limits=limits)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _sequence(_read(description, limits))


def check_description(
    description: object, *, shape: tuple[int, ...], classes: int, limits: Limits = LIMITS
) -> dict[str, Any]:
    """The description in lists and dicts of its own, if a model can be built from it; UsageError if not.

    It is tried on torch's meta device: no memory, no arithmetic, no random numbers.
    """
    nodes = _read(description, limits)
    _check_task(shape, classes)
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        model = _sequence(nodes)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if not parameters:
            raise UsageError("a description without a layer that can be trained. Add one, such as Linear.")
        if parameters > limits.parameters:
            raise UsageError(f"a description with {parameters} parameters; at most {limits.parameters} are allowed.")
        _try(model, nodes, shape, classes, limits)
    return {"layers": _plain(nodes)}


# --- reading --------------------------------------------------------------------------------------------------------
def _read(description: object, limits: Limits) -> list[_Node]:
    if not isinstance(description, Mapping) or list(description) != ["layers"]:
        raise UsageError('a description that is not {"layers": [...]} alone. Give it one list of layers.')
    layers = description["layers"]
    if not isinstance(layers, list | tuple) or not layers:
        raise UsageError(f"a description whose layers are not {Layers().words}.")
    return _Reader(limits).layers(layers, place="", depth=1)


class _Reader:
    """Counts the layers of one description as it reads them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._count = 0

    def layers(self, entries: list[object] | tuple[object, ...], *, place: str, depth: int) -> list[_Node]:
        if depth > self._limits.depth:
            raise UsageError(f"layers inside layers deeper than {self._limits.depth}, which is the limit.")
        return [self._layer(entry, f"{place}{number}", depth) for number, entry in enumerate(entries)]

    def _layer(self, entry: object, place: str, depth: int) -> _Node:
        self._count += 1
        if self._count > self._limits.layers:
            raise UsageError(f"a description with more than {self._limits.layers} layers, which is the limit.")
        kind = entry.get("type") if isinstance(entry, Mapping) else None
        if not isinstance(entry, Mapping) or not isinstance(kind, str) or kind not in LAYERS:
            found = f"type {_shown(kind)}" if isinstance(entry, Mapping) else _shown(entry)
            raise UsageError(f"layer {place}: {found}; needs a type, one of {', '.join(LAYERS)}.")
        known, given = LAYERS[kind], [name for name in entry if name != "type"]
        where = f"layer {place} ({kind})"
        if odd := [name for name in given if name not in known.arguments]:
            offer = f"known are {', '.join(known.arguments)}" if known.arguments else "it has none"
            raise UsageError(f"{where}: unknown argument {_shown(odd[0])}; {offer}.")
        if missing := [name for name in known.required if name not in entry]:
            raise UsageError(f"{where}: no {missing[0]}; needs {known.arguments[missing[0]].words}.")
        arguments: dict[str, Any] = {}
        for name, argument in known.arguments.items():
            if name not in entry:
                continue
            try:
                value = argument.read(entry[name])
            except Unfit:
                raise UsageError(f"{where}: {name} {_shown(entry[name])}; needs {argument.words}.") from None
            if isinstance(value, list):  # layers: in the state_dict, those of a Sequential are its own
                inside = f"{place}." if kind == "Sequential" else f"{place}.{name}."
                value = self.layers(value, place=inside, depth=depth + 1)
            arguments[name] = value
        return _Node(place=place, kind=kind, arguments=arguments)


def _plain(nodes: list[_Node]) -> list[dict[str, Any]]:
    return [
        {"type": node.kind, **{name: _plain_value(value) for name, value in node.arguments.items()}} for node in nodes
    ]


def _plain_value(value: object) -> object:
    if isinstance(value, list):
        return _plain(value)
    return list(value) if isinstance(value, tuple) else value


# --- building and trying --------------------------------------------------------------------------------------------
def _sequence(nodes: list[_Node]) -> nn.Sequential:
    return nn.Sequential(*(_module(node) for node in nodes))


def _module(node: _Node) -> nn.Module:
    arguments = {name: _sequence(value) if isinstance(value, list) else value for name, value in node.arguments.items()}
    try:
        return node.type.make(**arguments)
    except UsageError:
        raise
    except Exception as error:  # torch has no error of its own for arguments that do not go together
        raise UsageError(f"layer {node.place} ({node.kind}): {_complaint(error)}.") from error


def _try(model: nn.Module, nodes: list[_Node], shape: tuple[int, ...], classes: int, limits: Limits) -> None:
    """Runs batches through a model on the meta device."""
    known = {found.place: found for node in nodes for found in node.inside if found.kind != "Sequential"}
    at: list[_Node] = []
    values = 0

    def enter(node: _Node, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        at.append(node)
        node.check_input(tuple(given[0].shape))

    def leave(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal values
        values += out.numel() // batch
        if not out.numel():
            raise UsageError("nothing is left of an example: its window is larger than what it gets")
        if values > limits.values:
            raise UsageError(f"with this one, {values} numbers are made of an example; at most {limits.values} may be")
        at.pop()

    for place, node in known.items():
        module = model.get_submodule(place)
        module.register_forward_pre_hook(partial(enter, node))
        module.register_forward_hook(leave)
    for batch, training in _TRIALS:
        values = 0
        try:
            out = model.train(training)(torch.empty(batch, *shape))
        except Exception as error:  # torch has no error of its own for shapes that do not fit
            raise UsageError(f"layer {at[-1].place} ({at[-1].kind}): {_complaint(error)}.") from error
        if out.shape != (batch, classes):
            raise UsageError(
                f"the layers make {tuple(out.shape)} of {batch} examples of {shape}; needs {(batch, classes)}, "
                "a number for each class."
            )


def _check_task(shape: tuple[int, ...], classes: int) -> None:
    for name, sizes, most in (("shape", shape, _MOST_SIZE), ("classes", (classes,), _MOST_CLASSES)):
        whole = all(isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= most for size in sizes)
        if not whole or not 1 <= len(sizes) <= _MOST_AXES:
            raise UsageError(
                f"{name} {'x'.join(map(str, sizes))}; needs 1 to {_MOST_AXES} whole numbers from 1 to {most}."
            )


def _shown(value: object) -> str:
    """Something of what a stranger wrote: enough to find it, never all of it."""
    if not isinstance(value, str | int | float | None):
        return f"of kind {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**_LONGEST:  # turning it into a text takes time
        return "a number of more digits than fit here"
    text = repr(value if not isinstance(value, str) else value[:_LONGEST])
    return text if len(text) <= 2 * _LONGEST else f"{text[:_LONGEST]}..."


def _complaint(error: Exception) -> str:
    """The first line of it."""
    return str(error).strip().partition("\n")[0][:_LONGEST_COMPLAINT].rstrip(". ") or type(error).__name__
