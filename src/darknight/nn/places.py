"""Which layers stay in the enclave because that is cheaper: by structure, or by what a batch of a known shape costs.

Shapes come from a copy of the model on torch's meta device, without values: buffers, generators and gradients of the
model itself are left as they are.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from darknight.errors import ProtectError
from darknight.nn.modules import op_of
from darknight.ops.cost import Form, Rates
from darknight.ops.place import stays_by_cost, stays_by_structure
from darknight.runtime import Runtime, measured_rates, sharing_of


def cheaper_at_home(
    model: nn.Module, layers: Mapping[str, nn.Module], runtime: Runtime, example: object, rates: Rates | None
) -> dict[str, str]:
    """By path, why a layer stays. example: None to decide by structure; a layer that it does not reach is too."""
    if example is None:
        if rates is not None:
            raise ProtectError("rates without an example: what a layer costs depends on its batch. Give one.")
        calls: Mapping[str, list[Form]] = {}
    else:
        calls = forms_of(model, layers, example, training=runtime.scheme.training)
        rates = measured_rates() if rates is None else rates
    sharing = sharing_of(runtime.scheme, 0.0 if runtime.fleet is None else runtime.fleet.elsewhere)
    found = {}
    for path, module in layers.items():
        if rates is not None and path in calls:
            found[path] = stays_by_cost(calls[path], sharing, rates)
        else:
            found[path] = stays_by_structure(op_of(module), _weight_shape(module))
    return {path: why for path, why in found.items() if why}


def forms_of(
    model: nn.Module, layers: Mapping[str, nn.Module], example: object, *, training: bool
) -> dict[str, list[Form]]:
    """Every call of a layer in one forward pass."""
    found: dict[str, list[Form]] = defaultdict(list)
    shadow = _on_meta(model)

    def note(path: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            x, weight = (*given, *named.values())[0], module.weight
            batch = x.shape if x.dim() >= weight.dim() else (1, *x.shape)  # type: ignore[operator]
            shape = tuple(weight.shape)  # type: ignore[arg-type]
            form = Form(op=op_of(module), x_shape=tuple(batch), w_shape=shape, grad_input=x.requires_grad)
            found[path].append(form)

        return hook

    for path in layers:
        shadow.get_submodule(path).register_forward_pre_hook(note(path), with_kwargs=True)
    given = example if isinstance(example, tuple) else (example,)
    try:
        with torch.device("meta"), torch.set_grad_enabled(training):
            shadow(*tree_map(_empty, given))
    except Exception as error:
        raise ProtectError(
            f"the example could not be run without values ({type(error).__name__}), so nobody knows the shapes of the "
            "layers. Give what the model is called with, or no example: then layers are placed by their structure."
        ) from error
    return dict(found)


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        shape = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _empty(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, device="meta", requires_grad=value.requires_grad)


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return tuple(weight.shape)
