"""A small convolutional network for small images."""

from __future__ import annotations

from torch import Tensor, nn

from darknight.errors import UsageError

SMALLEST = 4  # two poolings halve it twice


class SmallCNN(nn.Module):
    """Three 3x3 convolutions with batch norm and ReLU, two max poolings, a linear head.

    0.6 million multiplications for an 8x8 image of one channel, nearly all of them in the three convolutions.
    """

    def __init__(self, shape: tuple[int, int, int] = (1, 8, 8), classes: int = 10) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < SMALLEST:
            raise UsageError(
                f"images of {height}x{width}; SmallCNN pools twice and needs {SMALLEST}x{SMALLEST} or more. Use MLP."
            )
        self.features = nn.Sequential(
            *_convolution(channels, 16),
            *_convolution(16, 32),
            nn.MaxPool2d(2),
            *_convolution(32, 64),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(64 * (height // 4) * (width // 4), classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images).flatten(1))
        return scores


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """A convolution that keeps the size. It has no bias, because the batch norm behind it would remove it again."""
    return [
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]
