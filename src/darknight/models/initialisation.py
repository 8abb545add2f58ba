"""The weights with which training starts: torchvision's choices, so that a run can be compared with others."""

from __future__ import annotations

from torch import nn


def draw_weights(model: nn.Module, *, heads: bool) -> None:
    """Draws every convolution's weights anew, and with `heads` those of every linear layer, from torch's generator.

    Convolutions: Kaiming normal by fan-out (for a grouped one too, whose batch norm puts the scale right). Linear
    layers: normal with standard deviation 0.01. Biases of both become zero. Batch norms start as one and zero anyway.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif heads and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
