"""protect_ and unprotect_: a model's own modules, doing their bilinear work through a runtime.

Nothing of the model is replaced. Each module that takes part gets a `forward` of its own instance, so class,
parameters, buffers, state_dict, hooks and flags are what they were; a deep copy of a protected model is protected too.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import ParametrizationList

from darknight.errors import OpError, ProtectError
from darknight.nn.following import MARK, holds
from darknight.nn.modules import computes_as_known, kind_of, op_of
from darknight.nn.places import cheaper_at_home
from darknight.nn.public import full_name, label_of, public_weight, selected_parameters
from darknight.nn.reading import read
from darknight.nn.report import ENCLAVE, MASKED, Report, Row
from darknight.nn.steps import Reading
from darknight.nn.watch import Protection
from darknight.ops.cost import Rates
from darknight.ops.place import COST, WORKERS, check_place
from darknight.runtime import Runtime

Where = Callable[[str, nn.Module], bool | None]

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)


@dataclass(eq=False)
class _Binding:
    """What a protected module remembers: its path, its forward, and the one that its instance had before, if any."""

    protection: Protection
    path: str
    forward: Callable[..., Any]
    previous: Callable[..., Any] | None

    def __post_init__(self) -> None:
        self.protection.bound(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Binding:
        return _Binding(self.protection, self.path, *copy.deepcopy((self.forward, self.previous), memo))


def protect_(
    model: nn.Module,
    runtime: Runtime,
    *,
    where: Where | None = None,
    bounds: Mapping[str, float] | None = None,
    example: object = None,
    rates: Rates | None = None,
) -> Report:
    """Protects `model` in place and returns the report of what is masked, and what stays in the enclave and why.

    where: `where(name, module)` says of a layer, or of the owner of a matrix that other code multiplies with, whether
    it is masked (True), stays in the enclave (False), or goes where it is cheaper (None, and the default). It is asked
    now, once for each. bounds: `{name: C1}` declares the largest magnitude of a layer's input, for Real arithmetic; a
    field has no use for it. A layer that stays is computed by torch, in floats.

    What is cheaper is decided by structure: depthwise convolutions stay, on every machine. With `example`, a batch or a
    tuple of arguments as the model is called with, it is decided layer by layer from what the enclave's processor needs
    for such batches; only shapes matter. rates: of this machine, measured once (in less than a second) if None. Such
    places are part of the runtime's state, and a state that is loaded decides instead.

    Guarantees: state_dict keys, parameter objects, isinstance, hooks and flags stay as they are; a failing call leaves
        the model as it was; no product whose weight is not a parameter of the model is ever sent (contract tests:
        tests/nn/test_protect.py, tests/nn/test_failures.py, tests/nn/test_stays_home.py); no layer is masked because
        that is cheaper that `where` keeps (tests/nn/test_places.py).
    Assumes: parameters hold no private data: workers see them.
    Leaks: which layers there are, their shapes and their weights.
    """
    if not isinstance(model, nn.Module):
        raise ProtectError(f"a {type(model).__name__} where a torch.nn.Module belongs.")
    if not isinstance(runtime, Runtime):
        raise ProtectError(f"a {type(runtime).__name__} where a dk.Runtime belongs.")
    if where is not None and not callable(where):
        raise ProtectError("where must be a function of a layer's name and module that says True or False.")
    if runtime.closed:
        raise ProtectError("the runtime is closed. Make another one.")
    modules = _modules(model)
    _refuse(modules)
    asked = {path: where(path, module) for path, module in modules.items() if where and _has_matrix(module)}
    home = frozenset(path for path, answer in asked.items() if answer is not None and not answer)
    free = frozenset(path for path in modules if asked.get(path) is None)
    selected = selected_parameters(dict(model.named_modules()), home)
    plan = {path: _plan(path, module, home, selected) for path, module in modules.items()}
    masked = {path: modules[path] for path, row in plan.items() if row is not None and row.where == MASKED}
    stays = cheaper_at_home(model, {path: masked[path] for path in masked if path in free}, runtime, example, rates)
    for path, why in stays.items():
        plan[path] = Row(path, type(modules[path]).__name__, ENCLAVE, why, whole=True)
    declared = _checked_bounds(bounds or {}, plan)
    report = Report([row for row in plan.values() if row is not None], caution=runtime.caution)
    sent = {label_of(path, name) for path, answer in asked.items() if answer for name in modules[path]._parameters}
    protection = Protection(runtime, report, selected, declared, sent)
    try:
        for path, module in modules.items():
            if path in masked:
                protection.layer(path, type(module).__name__, stays.get(path, ""), free=path in free)
                _bind(protection, path, module, _masked_forward(type(module).forward))
            elif not isinstance(module, torch.jit.ScriptModule) and _may_multiply(module):
                _bind(protection, path, module, _forward_of(module))
    except BaseException:  # Ctrl-C while torch loads its compiler
        _unbind(model)
        raise
    return report


def protect_at(place: str, model: nn.Module, runtime: Runtime, batch: tuple[int, ...]) -> Report:
    """protect_ by the name of a place (ops.place): STRUCTURE, COST for batches of the shape `batch`, or WORKERS."""
    check_place(place)
    example = torch.empty(batch, device="meta") if place == COST else None
    return protect_(model, runtime, where=_everything if place == WORKERS else None, example=example)


def _everything(name: str, module: nn.Module) -> bool:
    return True


def unprotect_(model: nn.Module) -> None:
    """Makes `model` an ordinary model again. Its weights are what training made of them."""
    if not isinstance(model, nn.Module):
        raise ProtectError(f"a {type(model).__name__} where a torch.nn.Module belongs.")
    bound = {path: module for path, module in model.named_modules() if MARK in vars(module)}
    if not bound:
        raise ProtectError("this model is not protected.")
    for path, module in bound.items():
        if vars(module).get("forward") is not vars(module)[MARK].forward:
            name = path or type(module).__name__
            raise ProtectError(f"{name} got another forward after it was protected. Put that back first.")
    _unbind(model)


def _unbind(model: nn.Module) -> None:
    for module in model.modules():
        binding = vars(module).pop(MARK, None)
        if binding is not None:
            vars(module).pop("forward", None)
            if binding.previous is not None:
                vars(module)["forward"] = binding.previous
            binding.protection.unbound(binding)


# --- what becomes of a module ---------------------------------------------------------------------------------------
def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by path, without the insides of scripted ones and of parametrisations, which stay as they are."""
    closed = (torch.jit.ScriptModule, ParametrizationList)
    outer = [path for path, module in model.named_modules() if isinstance(module, closed)]
    return {
        path: module
        for path, module in model.named_modules()
        if not any(path.startswith(f"{name}." if name else "") and path != name for name in outer)
        and not isinstance(module, ParametrizationList)
    }


def _refuse(modules: Mapping[str, nn.Module]) -> None:
    for path, module in modules.items():
        name = path or type(module).__name__
        if MARK in vars(module):
            raise ProtectError(f"{name} is protected already. Call dk.unprotect_ first.")
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise ProtectError(f"{name} has no parameters yet. Run one batch through the model before protecting it.")
        for parameter in module.parameters(recurse=False):
            if parameter.device.type != "cpu":
                raise ProtectError(
                    f"{name} has parameters on {parameter.device}; the enclave computes on the CPU. "
                    "Move the model there: model.cpu()."
                )


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)) or kind_of(module) is not None


def _plan(path: str, module: nn.Module, home: Set[str], selected: Set[str]) -> Row | None:
    """The module's row in the report; None for what has no parameters of its own."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return Row(path, kind, ENCLAVE, "scripted: what it computes cannot be seen", flops=None)
    if kind_of(module) is not None:
        if path in home:
            return Row(path, kind, ENCLAVE, "excluded by where", whole=True)
        if module._parameters.get("weight") is not None and full_name(path, "weight") not in selected:
            return Row(path, kind, ENCLAVE, "its weight is tied to a layer that stays in the enclave", whole=True)
        try:
            op_of(module)
        except OpError as error:
            return Row(path, kind, ENCLAVE, str(error), whole=True)
        if public_weight(module) is None:
            return Row(path, kind, ENCLAVE, "its weight is computed, and not by torch's weight_norm", whole=True)
        return Row(path, kind, MASKED, "")
    if not any(True for _ in module.parameters(recurse=False)):
        return None
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return Row(path, kind, ENCLAVE, "its products are fused with its non-linear functions", whole=True)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Row(path, kind, ENCLAVE, "a table lookup")
    if isinstance(module, _NORMS):
        return Row(path, kind, ENCLAVE, "cheap, and not a product")
    return Row(path, kind, ENCLAVE, "not a layer that is known; products with its parameters are listed when called")


def _may_multiply(module: nn.Module) -> bool:
    """Whether functional products may happen in the module's own forward, or below it."""
    if type(module).forward is nn.Module.forward:  # a container without a forward
        return False
    if any(True for _ in module.children()) or not _is_torchs_own(module):
        return True
    return any(True for _ in module.parameters()) and not isinstance(module, (*_NORMS, nn.Embedding))


def _is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


def _checked_bounds(bounds: Mapping[str, float], plan: Mapping[str, Row | None]) -> dict[str, float]:
    for name, bound in bounds.items():
        row = plan.get(name)
        if row is None or row.where != MASKED:
            raise ProtectError(f"bounds names {name!r}, which is no layer that is masked.")
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound) or bound <= 0:
            raise ProtectError(f"bounds[{name!r}]={bound!r}; needs a positive number.")
    return {name: float(bound) for name, bound in bounds.items()}


# --- forwards -------------------------------------------------------------------------------------------------------
def _bind(protection: Protection, path: str, module: nn.Module, forward: Callable[..., Any]) -> None:
    # torch.compile must not look inside: noise that it takes for a constant would be used again. (The first call loads
    # the compiler, which takes seconds; making an optimizer does so anyway.)
    uncompiled = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    # A bound method, because a deep copy binds it to the copied module.
    bound = MethodType(uncompiled, module)
    vars(module)[MARK] = _Binding(protection, path, bound, vars(module).get("forward"))
    vars(module)["forward"] = bound


def _masked_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a linear map or convolution, with the arguments that torch's has."""

    @functools.wraps(original)
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        binding: _Binding = vars(self)[MARK]
        protection = binding.protection
        weight = public_weight(self) if computes_as_known(self) else None
        if weight is None:  # somebody put another tensor in its place, or another way to compute
            with protection.watching(binding.path, self):
                return type(self).forward(self, input, *args, **kwargs)
        if why := protection.reason(binding.path):
            with protection.watching(binding.path, self), protection.staying(why, self):
                return type(self).forward(self, input, *args, **kwargs)
        op = op_of(self, _output_padding(self, input, *args, **kwargs))
        return protection.product(binding.path, type(self).__name__, op, input, weight, self.bias, self)

    return forward


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """For a module that is no layer: its own forward, of which it may be known what stands behind each layer."""
    own = vars(module).get("forward")
    if own is not None:
        return _watched_forward(own)
    if type(module).forward is nn.Sequential.forward:
        return _sequence_forward(type(module).forward)
    reading = read(type(module).forward)
    return _watched_forward(type(module).forward) if reading is None else _followed_forward(reading)


def _watched_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The module's own forward, with its functional products seen."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        binding: _Binding = vars(self)[MARK]
        with binding.protection.watching(binding.path, self):
            if binding.previous is not None:
                return binding.previous(*args, **kwargs)
            return type(self).forward(self, *args, **kwargs)

    return forward


def _sequence_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a Sequential, in which it is known what stands behind each layer."""

    @functools.wraps(original)
    def forward(self: Any, input: Any) -> Any:
        binding: _Binding = vars(self)[MARK]
        with binding.protection.watching(binding.path, self):
            return binding.protection.run(self, input)

    return forward


def _followed_forward(reading: Reading) -> Callable[..., Any]:
    """A forward that was read: the same steps, as long as it is what was read."""

    @functools.wraps(reading.function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        binding: _Binding = vars(self)[MARK]
        with binding.protection.watching(binding.path, self):
            if not kwargs and holds(reading, self, args):
                return binding.protection.follow(reading, self, args)
            return type(self).forward(self, *args, **kwargs)

    return forward


def _output_padding(module: nn.Module, input: Tensor, output_size: Any = None) -> tuple[int, ...] | None:
    if output_size is None or not hasattr(module, "_output_padding"):
        return None
    axes = len(module.kernel_size)  # type: ignore[arg-type]
    padding = module._output_padding(  # type: ignore[operator]
        input, output_size, module.stride, module.padding, module.kernel_size, axes, module.dilation
    )
    return tuple(padding)
