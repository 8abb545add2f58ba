"""How alike two images look to people: the structural similarity of Wang, Bovik, Sheikh and Simoncelli (2004)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d

_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


def structural_similarity(left: Tensor, right: Tensor, *, span: float) -> Tensor:
    """SSIM of each pair of images, (example, channel, height, width) -> (example,): 1 for equal ones.

    The usual Gaussian window of 11 pixels and deviation 1.5, cut to the image where that is smaller, at every place
    where it fits; channels are averaged. span: brightest minus darkest value that an image can have.
    """
    channels, height, width = left.shape[1:]
    kernel = torch.outer(_gaussian(height), _gaussian(width)).expand(channels, 1, -1, -1)

    def blurred(images: Tensor) -> Tensor:
        return conv2d(images, kernel, groups=channels)

    x, y = left.to(torch.float64), right.to(torch.float64)
    mean_x, mean_y = blurred(x), blurred(y)
    variance_x, variance_y = blurred(x * x) - mean_x**2, blurred(y * y) - mean_y**2
    covariance = blurred(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * span) ** 2, (_K2 * span) ** 2
    brightness = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return (brightness * structure).flatten(1).mean(1)


def _gaussian(side: int) -> Tensor:
    """Weights that add up to 1, an odd number of them, at most as many as the side has pixels."""
    size = min(_WINDOW, side if side % 2 else side - 1)
    offsets = torch.arange(size, dtype=torch.float64) - size // 2
    weights = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
    return weights / weights.sum()
