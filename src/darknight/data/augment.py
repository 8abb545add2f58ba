"""Random changes to training images that keep their class: crops, flips, holes. Drawn inside the enclave.

Guarantees: the result depends on the batch and the generator's state alone, bit by bit, whatever the number of threads;
a batch of n images always takes the same draws from the generator, so a resumed training goes on as it would have
(contract tests: tests/data/test_augment.py::test_the_generator_decides_and_threads_do_not,
tests/data/test_augment.py::test_the_draws_do_not_depend_on_the_images).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from darknight.errors import UsageError

_ATTEMPTS = 10
_LOG_RATIO = math.log(4 / 3)  # of width to height, at most and at least


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What happens to each image of a batch, in this order.

    resized_crop: cut out a piece with a share of the area between these two, its sides 3:4 to 4:3, and enlarge it to
        the whole size (ImageNet's custom: (0.08, 1)); None: do not.
    crop_padding: surround with so many zeros (the mean colour, as images are normalised) and cut out the old size
        anywhere; 0: do not.
    flip: mirror every second image, left to right.
    cutout: put a square of zeros of this side anywhere, even partly outside; 0: do not.

    >>> usual = Augmentation()
    >>> usual(torch.zeros(2, 3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """

    crop_padding: int = 4
    flip: bool = True
    cutout: int = 0
    resized_crop: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.crop_padding < 0 or self.cutout < 0:
            raise UsageError(
                f"crop_padding={self.crop_padding}, cutout={self.cutout}; needs whole numbers of at least 0."
            )
        if self.resized_crop is not None:
            least, most = self.resized_crop
            if not 0 < least <= most <= 1:
                raise UsageError(
                    f"resized_crop={self.resized_crop}; needs two shares of the area, 0 < least <= most <= 1."
                )
            if self.crop_padding:
                raise UsageError(
                    "resized_crop and crop_padding both crop; set crop_padding=0 or leave resized_crop out."
                )

    @classmethod
    def imagenet(cls) -> Augmentation:
        """Resized crops and flips, as usual for photographs of 224x224."""
        return cls(crop_padding=0, resized_crop=(0.08, 1.0))

    def __call__(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        """(example, channel, height, width) -> the same shape, in new memory."""
        if batch.ndim != 4 or not batch.is_floating_point():
            raise UsageError(
                f"a batch of {batch.dtype} and shape {tuple(batch.shape)}; images are floats of shape "
                "(example, channel, height, width)."
            )
        x = batch
        if self.resized_crop is not None:
            x = _resized_crop(x, self.resized_crop, generator)
        if self.crop_padding:
            x = _shifted(x, self.crop_padding, generator)
        if self.flip:
            x = _flipped(x, generator)
        if self.cutout:
            x = _cutout(x, self.cutout, generator)
        return batch.clone() if x is batch else x


def _shifted(batch: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """One gather for the whole batch: from which row and which column of the padded image each pixel comes."""
    count, channels, height, width = batch.shape
    down, right = torch.randint(0, 2 * padding + 1, (2, count, 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    return pad(batch, [padding] * 4)[
        torch.arange(count)[:, None, None, None],
        torch.arange(channels)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def _flipped(batch: Tensor, generator: torch.Generator) -> Tensor:
    chosen = torch.randint(0, 2, (len(batch), 1, 1, 1), generator=generator).bool()
    return torch.where(chosen, batch.flip(3), batch)


def _resized_crop(batch: Tensor, shares: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Boxes as in Szegedy et al. (2015): of ten drawn for each image, the first that fits; the whole image if none."""
    count, _, height, width = batch.shape
    least, most = shares
    area, ratio, down, right = torch.rand((4, count, _ATTEMPTS), generator=generator, dtype=torch.float64)
    area = height * width * (least + (most - least) * area)
    ratio = ((2 * ratio - 1) * _LOG_RATIO).exp()
    box = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()]).round().clamp(min=1)  # (side, image, attempt)
    size = torch.tensor([height, width], dtype=torch.float64).view(2, 1, 1)
    fits = (box <= size).all(dim=0)
    first = fits.to(torch.int64).argmax(dim=1)  # the first one, as ties go to the lowest index
    pick = torch.arange(count), first
    box = torch.where(fits.any(dim=1), box[:, *pick], size[:, :, 0])
    begin = (torch.stack([down[pick], right[pick]]) * (size[:, :, 0] - box + 1)).floor().clamp(min=0)
    return _sampled(batch, begin, box)


def _sampled(batch: Tensor, begin: Tensor, box: Tensor) -> Tensor:
    """Each image's box, enlarged to the whole size by bilinear interpolation. begin, box: (side, image), in pixels."""
    height, width = batch.shape[2:]

    def along(side: int, length: int) -> Tensor:
        """Where output pixels lie in the image, on grid_sample's scale from -1 to 1: (image, pixel)."""
        centres = (torch.arange(length, dtype=torch.float64) + 0.5) / length
        return (2 * (begin[side, :, None] + centres * box[side, :, None]) / length - 1).to(batch.dtype)

    rows = along(0, height)[:, :, None].expand(-1, -1, width)
    columns = along(1, width)[:, None, :].expand(-1, height, -1)
    grid = torch.stack([columns, rows], dim=-1)
    return grid_sample(batch, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _cutout(batch: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Squares as in DeVries and Taylor (2017): their centre is anywhere in the image."""
    count, _, height, width = batch.shape

    def hit(length: int) -> Tensor:
        begin = torch.randint(0, length, (count, 1), generator=generator) - side // 2
        places = torch.arange(length)
        return (places >= begin) & (places < begin + side)

    rows, columns = hit(height), hit(width)
    return batch.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)
