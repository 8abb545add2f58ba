"""A multilayer perceptron."""

from __future__ import annotations

import math

from torch import Tensor, nn


class MLP(nn.Module):
    """Three linear layers with ReLU between them, on the flattened example."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, *, hidden: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(shape), hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(inplace=True),
            nn.Linear(hidden // 2, classes),
        )

    def forward(self, examples: Tensor) -> Tensor:
        scores: Tensor = self.layers(examples)
        return scores
