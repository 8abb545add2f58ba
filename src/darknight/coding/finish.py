"""What a layer does to its product: to the floats, right after decoding, before anybody sees them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from darknight.kernels import compiled_layers as kernels
from darknight.kernels.compiled_layers import Affine, Limits


@dataclass(frozen=True, eq=False, kw_only=True)
class Finish:
    """Adds `bias` along the axis `channel`; then does what stands behind the layer: scales, and cuts to `limits`.

    scaling: of a batch normalisation in evaluation. limits: of an activation. Each of them may be missing.
    """

    channel: int
    bias: Tensor | None = None
    scaling: Affine | None = None
    limits: Limits | None = None

    def applied(self, y: Tensor) -> Tensor:
        """y, overwritten: bit for bit what the passes apart would make of it."""
        if self.bias is None and self.scaling is None and self.limits is None:
            return y
        library = kernels.chosen()
        if library is not None and kernels.finish(library, y, self.channel, self.bias, self.limits, self.scaling):
            return y
        if self.bias is not None:
            y += self._along(self.bias, y)
        if self.scaling is not None:
            y *= self._along(self.scaling.scale, y)
            y += self._along(self.scaling.shift, y)
        return y if self.limits is None else y.clamp_(*self.limits)

    def _along(self, values: Tensor, y: Tensor) -> Tensor:
        behind = y.dim() - 1 - self.channel % y.dim()
        return values.reshape(-1, *[1] * behind).to(y.dtype)
