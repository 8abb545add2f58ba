"""The ops that workers know, by name."""

from __future__ import annotations

from darknight.errors import OpError
from darknight.ops.conv import Conv
from darknight.ops.conv_transpose import ConvTranspose
from darknight.ops.linear import Linear
from darknight.ops.op import BilinearOp
from darknight.types import OpSpec

REGISTRY: dict[str, type[BilinearOp]] = {op.name: op for op in (Linear, Conv, ConvTranspose)}


def lookup(name: str) -> type[BilinearOp]:
    try:
        return REGISTRY[name]
    except KeyError:
        raise OpError(f"no op {name!r}; known are {', '.join(REGISTRY)}.") from None


def from_spec(spec: OpSpec) -> BilinearOp:
    """The op that a spec from the wire describes."""
    return lookup(spec.name).from_spec(spec)
