"""What a layer does to its product: to the floats, right after decoding, before anybody sees them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from darknight.kernels import compiled_layers as kernels
from darknight.kernels.compiled_layers import Limits


@dataclass(frozen=True, eq=False, kw_only=True)
class Finish:
    """Adds `bias` along the axis `channel`, then cuts to `limits`, as the activation does that stands behind the layer.

    Both may be missing.
    """

    channel: int
    bias: Tensor | None = None
    limits: Limits | None = None

    def applied(self, y: Tensor) -> Tensor:
        """y, overwritten: bit for bit what torch's sum and activation would make of it."""
        if self.bias is None and self.limits is None:
            return y
        library = kernels.chosen()
        if library is not None and kernels.finish(library, y, self.channel, self.bias, self.limits):
            return y
        if self.bias is not None:
            behind = y.dim() - 1 - self.channel % y.dim()
            y += self.bias.reshape(-1, *[1] * behind).to(y.dtype)
        return y if self.limits is None else y.clamp_(*self.limits)
