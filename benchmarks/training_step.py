"""Where does the time of a protected training step go? The enclave's part and the workers', over the plain step.

One step (forward, backward, SGD) of a small network, plain and protected in turns; K=4, M=1, Freivalds on all passes.
Local workers compute in turn on this machine, so their time is the sum over all of them, in float64. Nothing here is
tuned yet.

    python benchmarks/training_step.py
"""

from __future__ import annotations

import copy
import time

import torch
from torch import nn

import darknight as dk
from darknight.models import build_model

SHAPES = {
    "small-cnn, 1x8x8, batch 64": ("small-cnn", (1, 8, 8), 64),
    "small-cnn, 3x32x32, batch 32": ("small-cnn", (3, 32, 32), 32),
    "mlp, 1x28x28, batch 64": ("mlp", (1, 28, 28), 64),
}
STEPS = 5


def main() -> None:
    torch.manual_seed(0)
    scheme = dk.Scheme(inputs=4, colluders=1)
    for name, (model_name, shape, batch) in SHAPES.items():
        plain = build_model(model_name, shape=shape, classes=10, seed=0)
        private = copy.deepcopy(plain)
        x, y = torch.randn(batch, *shape), torch.randint(0, 10, (batch,))
        with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
            dk.protect_(private, runtime)
            step(plain, x, y), step(private, x, y)
            best_plain, best_total, best_waiting = (float("inf"),) * 3
            for _ in range(STEPS):
                best_plain = min(best_plain, step(plain, x, y))
                waited = runtime.ledger.waiting_seconds
                total = step(private, x, y)
                if total < best_total:
                    best_total, best_waiting = total, runtime.ledger.waiting_seconds - waited
        print(
            f"{name}: plain {1e3 * best_plain:.1f} ms; protected {best_total / best_plain:.1f} times that: "
            f"{(best_total - best_waiting) / best_plain:.1f} enclave, {best_waiting / best_plain:.1f} waiting"
        )


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Seconds of one step."""
    begun = time.perf_counter()
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
