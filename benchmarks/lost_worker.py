"""What a worker that stops costs: step time with all workers, with one stopped, and with it back, in one run.

The stop itself is noticed once, after the deadline; then the others do its part. A small convolutional network, K=4,
M=1, six worker processes on this machine. Ratios are of medians within this run.

    python benchmarks/lost_worker.py
"""

from __future__ import annotations

import os
import signal
import statistics
import time

import torch
from torch import nn

import darknight as dk

STEPS = 15
EXAMPLES = 32


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16 * 16, 10),
    )


def main() -> None:
    scheme = dk.Scheme(inputs=4, colluders=1)
    images, labels = torch.randn(EXAMPLES, 3, 32, 32), torch.randint(0, 10, (EXAMPLES,))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet, seed=0) as runtime:
        dk.protect_(model, runtime)

        def step() -> float:
            begun = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            return time.perf_counter() - begun

        def several() -> float:
            return statistics.median(step() for _ in range(STEPS))

        several()
        print(f"{'worker':<22}{'all there':>10}{'first step':>12}{'stopped':>10}{'ratio':>8}{'done in enclave':>17}")
        roles = {0: "data worker", scheme.inputs: "carrier of s", scheme.inputs + 1: "carrier of r"}
        for worker, role in roles.items():
            usual, parts = several(), runtime.ledger.done_in_enclave.total()
            os.kill(fleet.processes[worker], signal.SIGSTOP)
            try:
                first = step()
                stopped = several()
            finally:
                os.kill(fleet.processes[worker], signal.SIGCONT)
            usual = min(usual, several())
            done = runtime.ledger.done_in_enclave.total() - parts
            print(
                f"{f'{worker}, a {role}':<22}{usual:>9.3f}s{first:>11.3f}s{stopped:>9.3f}s{stopped / usual:>7.2f}x"
                f"{done / (STEPS + 1):>10.1f} a step"
            )


if __name__ == "__main__":
    main()
