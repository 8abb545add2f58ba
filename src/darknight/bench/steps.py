"""The step that is measured, plain or protected: forward, backward and SGD with momentum; or forward alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from darknight.errors import UsageError
from darknight.models import build_model
from darknight.runtime.phases import OUTSIDE, phase

CLASSES = 1000
OPTIMIZER = "optimizer"

Step = Callable[[], None]


def network(model: str, size: int) -> nn.Module:
    """The same weights every time."""
    return build_model(model, shape=(3, size, size), classes=CLASSES, seed=0)


def examples(batch: int, size: int) -> tuple[Tensor, Tensor]:
    """Images and labels, the same every time."""
    if min(batch, size) < 1:
        raise UsageError(f"batch {batch}, size {size}; each needs to be at least 1.")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, size, size, generator=generator)
    return images, torch.randint(0, CLASSES, (batch,), generator=generator)


def step_of(model: nn.Module, images: Tensor, labels: Tensor, *, training: bool) -> Step:
    model.train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True) if training else None

    def run() -> None:
        if optimizer is None:
            with torch.no_grad():
                model(images)
            return
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
        with phase(OPTIMIZER, OUTSIDE):
            optimizer.step()

    return run
