"""Which tensors are public: parameters of the model, views of them, and what torch's weight_norm makes of them.

Workers see weights. Whatever else a model multiplies with may depend on data, so it is never sent: a tensor that was
put in a parameter's place (torch.func.functional_call, a property, a hook), a buffer, memory that a parameter shares.

Guarantees: what is called public here is a Parameter, lies within one, or was computed from Parameters alone by torch's
    weight_norm in this very call (contract test: tests/nn/test_stays_home.py).
Assumes: Parameters hold no private data.
Leaks: which part of a parameter is used, where a model picks it by its data.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Set
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrize import ParametrizationList


def public_weight(module: nn.Module) -> Tensor | None:
    """`module.weight` if it is public, else None. It is read once: what is judged is what is returned."""
    own = vars(module)["_parameters"].get("weight")
    if own is None and not _computed_by_torch(module):
        return None
    if own is not None and hasattr(type(module), "weight"):  # a property in front of the parameter
        return None
    weight = module.weight
    assert isinstance(weight, Tensor)
    if own is not None and not (_is_parameter(own) and weight is own):
        return None
    return weight


def _computed_by_torch(module: nn.Module) -> bool:
    """Whether the weight is computed now, by torch's weight_norm alone, without anybody's hooks, from Parameters.

    The other parametrisations of torch keep buffers besides, which may be made from data.
    """
    if not parametrize.is_parametrized(module, "weight") or parametrize._cache_enabled:
        return False
    steps: Any = module.parametrizations["weight"]  # type: ignore[index]
    if type(steps) is not ParametrizationList or [type(step) for step in steps] != [parametrizations._WeightNorm]:
        return False
    names = ("original0", "original1")
    originals = [vars(steps)["_parameters"].get(name) for name in names]
    return (
        all(map(_is_parameter, originals))
        and not any(name in vars(steps) for name in names)
        and not any(map(_changed, (steps, *steps)))
        and not (hooks._global_forward_hooks or hooks._global_forward_pre_hooks)
    )


def _changed(module: nn.Module) -> bool:
    """Whether somebody replaced the module's forward, or hooked into it."""
    return "forward" in vars(module) or bool(module._forward_hooks) or bool(module._forward_pre_hooks)


def _is_parameter(tensor: object) -> TypeGuard[nn.Parameter]:
    """isinstance alone also believes a plain tensor that says so (_is_param)."""
    return isinstance(tensor, nn.Parameter) and type(tensor) is not Tensor


class PublicParameters:
    """The parameters of a running model by identity, with the layer that each belongs to.

    selected: the names of the parameters that may be sent, as they were when the model was protected.
    """

    def __init__(self, selected: Set[str]) -> None:
        self._selected = selected
        self._known: dict[int, tuple[weakref.ref[nn.Parameter], str, bool]] = {}

    def find(self, weight: Tensor, prefix: str, root: nn.Module) -> tuple[str, bool] | None:
        """The layer of a parameter of `root`, or of a view of one, and whether it is selected; None for all else."""
        parameter = _parameter_of(weight)
        if parameter is None:
            return None
        if self._look_up(parameter) is None:
            self._learn(prefix, root)
        found = self._look_up(parameter)
        if found is None:
            return None
        label, selected = found
        if weight.shape != parameter.shape or weight.stride() != parameter.stride():
            start = weight.storage_offset() - parameter.storage_offset()
            label = f"{label}[{start}:{start + weight.numel()}]"
        return label, selected

    def _look_up(self, parameter: nn.Parameter) -> tuple[str, bool] | None:
        entry = self._known.get(id(parameter))
        return entry[1:] if entry is not None and entry[0]() is parameter else None

    def _learn(self, prefix: str, root: nn.Module) -> None:
        self._known.clear()
        for path, module in root.named_modules(prefix=prefix):
            for name, parameter in module._parameters.items():
                # torch.func.functional_call puts other tensors in place of parameters.
                if _is_parameter(parameter) and self._look_up(parameter) is None:
                    selected = full_name(path, name) in self._selected
                    self._known[id(parameter)] = (weakref.ref(parameter), label_of(path, name), selected)


def selected_parameters(modules: Mapping[str, nn.Module], home: Set[str]) -> frozenset[str]:
    """The names of all parameters but those that a module in `home` owns, alone or tied with others."""
    owned = [
        (full_name(path, name), parameter, path in home)
        for path, module in modules.items()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    kept = {id(parameter) for _, parameter, stays in owned if stays}
    return frozenset(name for name, parameter, _ in owned if id(parameter) not in kept)


def full_name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def label_of(path: str, name: str) -> str:
    """What a product with a parameter is called: its layer, or the parameter where that says more."""
    return path if name == "weight" and path else full_name(path, name)


def _parameter_of(weight: Tensor) -> nn.Parameter | None:
    """The parameter that `weight` is or lies within. Sharing memory is not enough: the rest of it may be anybody's."""
    if _is_parameter(weight):
        return weight
    try:
        base = weight._base
        if not _is_parameter(base) or not weight.numel():
            return None
        memory = [tensor.untyped_storage().data_ptr() for tensor in (weight, base)]
        start, end = _range(weight)
        least, most = _range(base)
    except RuntimeError:  # torch.func's wrappers and sparse tensors have no memory of their own
        return None
    # A view can be pointed at other memory (.data, set_) and goes on naming its base.
    same = memory[0] == memory[1] and weight.dtype == base.dtype and base.is_contiguous()
    return base if same and least <= start and end <= most else None


def _range(tensor: Tensor) -> tuple[int, int]:
    """The first and the last element of its storage that a tensor touches."""
    start = int(tensor.storage_offset())
    return start, start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
