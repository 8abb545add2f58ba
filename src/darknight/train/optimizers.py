"""The optimizer of a recipe, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from darknight.errors import DataError
from darknight.train.recipe import Recipe

_COUNTER = "step"  # of Adam: a single number for each parameter
_ENTRIES = {"sgd": ("momentum_buffer",), "adam": (_COUNTER, "exp_avg", "exp_avg_sq")}
_ENTRIES["adamw"] = _ENTRIES["adam"]


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Weight decay is for parameters of two axes and more: it spares biases and normalisation layers.

    fused: torch's own, in one pass over parameter, gradient and state (docs/adr/0027).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match recipe.optimizer:
        case "adam":
            return torch.optim.Adam(groups, lr=recipe.learning_rate, fused=True)
        case "adamw":
            return torch.optim.AdamW(groups, lr=recipe.learning_rate, fused=True)
        case _:
            momentum, nesterov = recipe.momentum, recipe.nesterov
            return torch.optim.SGD(groups, recipe.learning_rate, momentum, nesterov=nesterov, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """What the optimizer remembers: "exp_avg/features.0.weight" and so on."""
    return {
        f"{entry}/{name}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, recipe: Recipe, tensors: Mapping[str, Tensor]
) -> None:
    """Puts back what `optimizer_tensors` gave. Anything that does not fit the model is refused before it is used."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    entries = _ENTRIES[recipe.optimizer]
    known = {f"{entry}/{name}" for entry in entries for name in parameters}
    if unknown := sorted(tensors.keys() - known):
        raise DataError(f"the optimizer's state has {unknown[0]!r}, which {recipe.optimizer} of this model has not.")
    found: dict[nn.Parameter, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        present = [entry for entry in entries if f"{entry}/{name}" in tensors]
        if present and len(present) < len(entries):
            raise DataError(f"the optimizer's state has only {', '.join(present)} of {name}.")
        for entry in present:
            value = tensors[f"{entry}/{name}"]
            single = entry == _COUNTER
            shape, dtype = (torch.Size(()), torch.float32) if single else (parameter.shape, parameter.dtype)
            if value.shape != shape or value.dtype != dtype:
                raise DataError(
                    f"the optimizer's {entry} of {name} is {value.dtype} of shape {tuple(value.shape)}; needs {dtype} "
                    f"of shape {tuple(shape)}."
                )
            found.setdefault(parameter, {})[entry] = value
    optimizer.state.clear()
    for parameter, state in found.items():
        optimizer.state[parameter] = {entry: value.clone() for entry, value in state.items()}
