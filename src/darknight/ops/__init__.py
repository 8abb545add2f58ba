"""The bilinear ops that can be outsourced: one file each, one registry, in float and in F_p.

This room imports nothing of the project but errors and types, because the untrusted worker runs it alone.
"""

from darknight.ops.conv import Conv
from darknight.ops.conv_transpose import ConvTranspose
from darknight.ops.linear import Linear
from darknight.ops.op import BilinearOp, collapse_rows
from darknight.ops.padding import Padding
from darknight.ops.registry import REGISTRY, from_spec, lookup

__all__ = [
    "REGISTRY",
    "BilinearOp",
    "Conv",
    "ConvTranspose",
    "Linear",
    "Padding",
    "collapse_rows",
    "from_spec",
    "lookup",
]
