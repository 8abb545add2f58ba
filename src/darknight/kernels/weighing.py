"""Weighed sums by the compiled library where there is one, else by the reference."""

from __future__ import annotations

from torch import Tensor

from darknight.kernels import compiled, reference


def weigh(values: Tensor, vectors: Tensor, longest: int, groups: int = 1) -> Tensor:
    """As reference.weigh, which says what it is; the same to the last bit while sums stay within 2^53."""
    function = compiled.chosen()
    if function is None or not compiled.suits(values, vectors):
        return reference.weigh(values, vectors, longest, groups)
    return compiled.weigh(values, vectors, longest, groups, function)
