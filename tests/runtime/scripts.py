"""Small training scripts that tests run through a runtime."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import darknight as dk
from darknight.runtime import field as field_calls
from darknight.runtime import scales
from fleet.threads import thread_fleet


def network(seed: int = 0) -> nn.Module:
    """Convolutions with groups and stride, batch norm, in-place ReLU, a linear head; about a thousand parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, stride=2, groups=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 2 * 2, 5),
    )


def batch(examples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(examples, 2, 6, 6, generator=generator), torch.randint(0, 5, (examples,), generator=generator)


def train(model: nn.Module, examples: int = 7, steps: int = 2) -> Tensor:
    """All parameters after a few steps of momentum SGD, in one vector."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, target = batch(examples, seed=step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained_by_fleet(scheme: dk.Scheme, examples: int = 7, seed: int = 0, steps: int = 2) -> Tensor:
    model = network()
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet, seed=seed) as runtime:
        dk.protect_(model, runtime)
        return train(model, examples, steps)


def trained_alone(scheme: dk.Scheme, examples: int = 7, seed: int = 0, steps: int = 2) -> Tensor:
    model = network()
    with dk.Runtime(scheme, None, seed=seed) as runtime:
        dk.protect_(model, runtime)
        return train(model, examples, steps)


def forced(monkeypatch, excess: int) -> None:
    """Scales that are 2^excess times too large: results fill the field's range, and then some."""

    def too_large(estimate):
        def exponent(*arguments, **options):
            fitting = estimate(*arguments, **options)
            # As large as the range allows for this layer's real results, and then `excess` bits more.
            return (fitting[0] + 8 + excess, fitting[1]) if isinstance(fitting, tuple) else fitting + 8 + excess

        return exponent

    monkeypatch.setattr(field_calls, "input_exponent", too_large(scales.input_exponent))
    monkeypatch.setattr(field_calls, "gradient_exponent", too_large(scales.gradient_exponent))
