"""The networks on which rivals are measured: those of their own examples, so that they are at home.

Layers are in one nn.Sequential, and the programs of the rivals load parameters by the names that they have in it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from darknight.data.digits import read_digits
from darknight.errors import UsageError

SHAPE = (1, 28, 28)
CLASSES = 10
POOLINGS = {"average": nn.AvgPool2d, "max": nn.MaxPool2d}


class Square(nn.Module):
    """The activation of networks that compute on ciphertexts: it has no comparison."""

    def forward(self, values: Tensor) -> Tensor:
        return values.square()


def training_network(pooling: str) -> nn.Sequential:
    """The network of CrypTen's example mpc_autograd_cnn, with ten classes.

    The example pools by maximum. Average pooling is the kinder choice: a maximum costs CrypTen comparisons.
    """
    if pooling not in POOLINGS:
        raise UsageError(f"pooling {pooling!r}; needs one of {', '.join(POOLINGS)}.")
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        POOLINGS[pooling](2),
        nn.Flatten(),
        nn.Linear(16 * 12 * 12, 100),
        nn.ReLU(),
        nn.Linear(100, CLASSES),
    )


def inference_network() -> nn.Sequential:
    """The network of TenSEAL's tutorial on encrypted convolution: deep networks and ReLU are beyond CKKS there."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 7, stride=3), Square(), nn.Flatten(), nn.Linear(4 * 8 * 8, 64), Square(), nn.Linear(64, CLASSES)
    )


def digits(batch: int) -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits, enlarged from 8x8 to the size of MNIST's, from 0 to 1; and their labels."""
    part = read_digits().train
    if not 0 < batch <= len(part.labels):
        raise UsageError(f"batch {batch}; needs 1 to {len(part.labels)}.")
    small = part.source.read(torch.arange(batch))
    return nn.functional.interpolate(small / small.max(), size=SHAPE[1:], mode="bilinear"), part.labels[:batch]


def network_words(model: nn.Sequential) -> str:
    """Its layers, in a line."""
    return ", ".join(_layer(layer) for layer in model.children())


def _layer(layer: nn.Module) -> str:
    match layer:
        case nn.Conv2d():
            stride = f"/{layer.stride[0]}" if layer.stride[0] > 1 else ""
            return (
                f"conv {layer.in_channels}-{layer.out_channels} {layer.kernel_size[0]}x{layer.kernel_size[1]}{stride}"
            )
        case nn.Linear():
            return f"linear {layer.in_features}-{layer.out_features}"
        case _:
            return type(layer).__name__
