"""Which tensors are public: parameters of the model, views of them, and what torch's own parametrisations make of them.

Workers see weights. Whatever else a model multiplies with may depend on data, so it is never sent: a tensor that was
put in a parameter's place (torch.func.functional_call, a property, a hook), a buffer, memory that a parameter shares.

Guarantees: what is called public here is a Parameter, lies within one, or was computed from Parameters alone by torch's
    own code in this very call (contract test: tests/nn/test_stays_home.py).
Assumes: Parameters hold no private data.
Leaks: which part of a parameter is used, where a model picks it by its data.
"""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

# What torch.nn.utils.parametrizations registers: functions of the parameters and of nothing else.
_TORCHS_OWN = (parametrizations._WeightNorm, parametrizations._SpectralNorm, parametrizations._Orthogonal)


def public_weight(module: nn.Module) -> Tensor | None:
    """`module.weight` if it is public, else None. It is read once: what is judged is what is returned."""
    own = vars(module)["_parameters"].get("weight")
    if own is None and not _computed_by_torch(module):
        return None
    if own is not None and hasattr(type(module), "weight"):  # a property in front of the parameter
        return None
    weight = module.weight
    assert isinstance(weight, Tensor)
    if own is not None and not (isinstance(own, nn.Parameter) and weight is own):
        return None
    return weight


def _computed_by_torch(module: nn.Module) -> bool:
    """Whether the weight is computed now, by torch's own parametrisations without anybody's hooks, from Parameters."""
    if not parametrize.is_parametrized(module, "weight") or parametrize._cache_enabled:
        return False
    steps: Any = module.parametrizations["weight"]  # type: ignore[index]
    names = {f"original{suffix}" for suffix in ("", *range(10))} & {*steps._parameters, *steps._buffers}
    originals = [steps._parameters.get(name) for name in names]
    return (
        bool(originals)
        and all(isinstance(tensor, nn.Parameter) for tensor in originals)
        and all(type(step) in _TORCHS_OWN and not _changed(step) for step in steps)
        and not _changed(steps)
    )


def _changed(module: nn.Module) -> bool:
    """Whether somebody replaced the module's forward, or hooked into it."""
    return "forward" in vars(module) or bool(module._forward_hooks) or bool(module._forward_pre_hooks)


class PublicParameters:
    """The parameters of a running model by identity, with the layer that each belongs to.

    home: the modules whose products stay in the enclave, by path.
    """

    def __init__(self, home: Set[str]) -> None:
        self._home = home
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
            selected = path not in self._home
            for name, parameter in module._parameters.items():
                if not isinstance(parameter, nn.Parameter):  # put there by torch.func.functional_call
                    continue
                label = path if name == "weight" and path else f"{path}.{name}".lstrip(".")
                first = self._look_up(parameter)
                if first is None:
                    self._known[id(parameter)] = (weakref.ref(parameter), label, selected)
                elif not selected:  # a tied weight: one owner that stays home keeps it home
                    self._known[id(parameter)] = (weakref.ref(parameter), first[0], False)


def _parameter_of(weight: Tensor) -> nn.Parameter | None:
    """The parameter that `weight` is or lies within. Sharing memory is not enough: the rest of it may be anybody's."""
    if isinstance(weight, nn.Parameter):
        return weight
    try:
        base = weight._base
        if not isinstance(base, nn.Parameter) or not weight.numel():
            return None
        start, end = _range(weight)
        least, most = _range(base)
    except RuntimeError:  # torch.func's wrappers and sparse tensors have no memory of their own
        return None
    return base if base.is_contiguous() and least <= start and end <= most else None


def _range(tensor: Tensor) -> tuple[int, int]:
    """The first and the last element of its storage that a tensor touches."""
    start = int(tensor.storage_offset())
    return start, start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
