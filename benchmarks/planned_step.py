"""How far are the seconds of `darknight plan` from those of a real step?

For each network one training step under a scheme with K=4 and M=1, by worker processes on this machine: the processor
time of the enclave (what it computes, without what it waits for) beside what the plan expects with its default speeds,
and how many products a worker does in a second, as workers say, which on a busy machine is less than they can. One
thread on each side.

    python benchmarks/planned_step.py [--steps 3]
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn.functional import cross_entropy

import darknight as dk
from darknight.models import build_model
from darknight.plan import Plan, Request, make_plan

CASES = [
    ("mlp", (1, 4, 4), 8),
    ("small-cnn", (1, 8, 8), 64),
    ("resnet-small", (3, 32, 32), 32),
    ("vgg-small", (3, 32, 32), 32),
    ("mobilenet-small", (3, 32, 32), 32),
    ("resnet18", (3, 32, 32), 16),
]
ARITHMETICS: dict[str, dict[str, object]] = {
    "field": {"arithmetic": "field"},
    "real": {"arithmetic": "real", "leakage_target": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"{'network':16} {'batch':>5} {'':5}  enclave s  planned   ratio   GFLOP/s of a worker")
    for name, shape, batch in CASES:
        for arithmetic, target in ARITHMETICS.items():
            plan = make_plan(
                Request(
                    model=name,
                    shape=shape,
                    classes=10,
                    batch_size=batch,
                    examples=batch,
                    operators=tuple("abcdef"),
                    max_inputs=4,
                    **target,  # type: ignore[arg-type]
                )
            )
            enclave, workers = measured(plan, steps)
            planned, speed = plan.step.seconds.enclave, plan.step.worker_flops / workers / 1e9
            ratio = enclave / planned
            print(f"{name:16} {batch:5} {arithmetic:5} {enclave:10.3f} {planned:8.3f} {ratio:7.2f} {speed:12.1f}")


def measured(plan: Plan, steps: int) -> tuple[float, float]:
    """Seconds of a step: the enclave's processor, and all workers together."""
    shape, batch = plan.request.shape, plan.request.batch_size
    model = build_model(plan.request.model, shape=shape, classes=10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(batch, *shape), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with dk.local_fleet(plan.scheme) as fleet, dk.Runtime(plan.scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        step()
        workers, enclave = runtime.ledger.worker_seconds, time.thread_time()
        for _ in range(steps):
            step()
        return (time.thread_time() - enclave) / steps, (runtime.ledger.worker_seconds - workers) / steps


if __name__ == "__main__":
    main()
