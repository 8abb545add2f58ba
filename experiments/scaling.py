"""How cost grows: time, bytes and error of a training step with K = 1..8, M = 1..3 and the size of a batch.

One step, forward and backward, of a small network on random images, in the field and in real arithmetic (float64,
gradients masked), by worker processes on this machine that are the same for all cells. Times are seconds of processors
over those of the same step in the clear, taken in turns, the best of several rounds. The number of virtual batches is
the batch over K, rounded up: the sweep over batches has K=4 and so 1 to 16 of them.

    python experiments/scaling.py --out results/scaling.json
    python experiments/scaling.py --out /tmp/quick.json --quick         # in a minute

Errors are relative, against the same network in float64: of the scores, and of the gradient of all parameters together
(root of the mean square).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recording import Recording, run_or_explain
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import darknight as dk
from darknight.bench.processors import processor_seconds
from darknight.fleet.local import LocalFleet
from darknight.models import build_model

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Cell:
    sweep: str
    arithmetic: str
    scheme: dk.Scheme
    batch: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file, which is resumed if it is there")
    parser.add_argument("--model", default="vgg-small", help="of `darknight models` (default: vgg-small)")
    parser.add_argument("--size", type=int, default=32, help="pixels a side (default: 32)")
    parser.add_argument("--batch-size", type=int, default=24, help="where it is not swept (default: 24)")
    parser.add_argument("--rounds", type=int, default=3, help="the best counts (default: 3)")
    parser.add_argument("--noise-std", type=float, default=2e4, help="of real arithmetic (default: 2e4)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, images and rounding (default: 0)")
    parser.add_argument("--quick", action="store_true", help="8x8 images, K up to 2: to see that it works")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.quick:
        flags.size, flags.batch_size, flags.rounds = 8, 4, 1
    plan = cells(flags)
    scale = {
        "model": flags.model,
        "image": [3, flags.size, flags.size],
        "batch_size": flags.batch_size,
        "rounds": flags.rounds,
        "seed": flags.seed,
        "noise_std": flags.noise_std,
    }
    run = Recording("scaling", flags.out, scale=scale, planned=list(plan))
    if run.missing:
        largest = max((plan[name].scheme for name in run.missing), key=lambda scheme: scheme.workers)
        with dk.local_fleet(largest, patience=3600.0) as fleet:
            for name in run.missing:
                run.add(name, measured(plan[name], flags, fleet))


def cells(flags: argparse.Namespace) -> dict[str, Cell]:
    """By name. What cannot be masked in real arithmetic (some M at this noise) is no cell."""
    inputs, colluders = (range(1, 3), range(1, 2)) if flags.quick else (range(1, 9), range(1, 4))
    batches = (2, 4) if flags.quick else (4, 8, 16, 32, 64)
    found: dict[str, Cell] = {}
    for arithmetic, numbers in {"field": dk.Field(), "real": dk.Real(flags.noise_std)}.items():

        def add(sweep: str, value: int, batch: int, *, k: int, m: int, how: str = arithmetic, a: Any = numbers) -> None:
            try:
                scheme = dk.Scheme(inputs=k, colluders=m, arithmetic=a)
            except dk.errors.SchemeError:
                return
            found[f"{how}/{sweep}={value}"] = Cell(sweep=sweep, arithmetic=how, scheme=scheme, batch=batch)

        for k in inputs:
            add("inputs", k, flags.batch_size, k=k, m=1)
        for m in colluders:
            add("colluders", m, flags.batch_size, k=2, m=m)
        for batch in batches:
            add("batch", batch, batch, k=4, m=1)
    return found


def measured(cell: Cell, flags: argparse.Namespace, fleet: LocalFleet) -> dict[str, Any]:
    shape = (3, flags.size, flags.size)
    generator = torch.Generator().manual_seed(flags.seed)
    images = torch.randn(cell.batch, *shape, generator=generator)
    labels = torch.randint(0, CLASSES, (cell.batch,), generator=generator)
    exact, plain, private = (build_model(flags.model, shape=shape, classes=CLASSES, seed=flags.seed) for _ in range(3))
    wanted = step(exact.double(), images.double(), labels)
    pids = tuple(fleet.processes.values())
    clear = enclave = workers = float("inf")
    with dk.Runtime(cell.scheme, fleet, seed=flags.seed) as runtime:
        dk.protect_(private, runtime)
        found = step(private, images, labels)
        step(plain, images, labels)
        before = runtime.ledger.sent_bytes, runtime.ledger.received_bytes
        for _ in range(flags.rounds):
            clear = min(clear, seconds(plain, images, labels)[0])
            mine, theirs = seconds(private, images, labels, pids)
            enclave, workers = min(enclave, mine), min(workers, theirs)
        ledger = runtime.ledger
        sent, received = ledger.sent_bytes - before[0], ledger.received_bytes - before[1]
    return {
        "sweep": cell.sweep,
        "arithmetic": cell.arithmetic,
        "inputs": cell.scheme.inputs,
        "colluders": cell.scheme.colluders,
        "workers": cell.scheme.workers,
        "batch": cell.batch,
        "virtual_batches": -(-cell.batch // cell.scheme.inputs),
        "enclave": enclave / clear,
        "all_workers": workers / clear,
        "sent_bytes": sent // flags.rounds,
        "received_bytes": received // flags.rounds,
        "input_bytes": images.numel() * images.element_size(),
        "forward_error": error(found["scores"], wanted["scores"]),
        "gradient_error": error(found["gradient"], wanted["gradient"]),
    }


def step(model: nn.Module, images: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
    """One pass forward and one backward: scores, and the gradient of all parameters."""
    model.train()
    model.zero_grad()
    scores = model(images)
    cross_entropy(scores, labels).backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return {"scores": scores.detach(), "gradient": torch.cat(gradients)}


def seconds(model: nn.Module, images: Tensor, labels: Tensor, pids: tuple[int, ...] = ()) -> tuple[float, float]:
    """Of the processors of one step: this process, and the workers. Weights change in between, as they do."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.0009765625
    everybody, mine = processor_seconds(pids), time.process_time()
    step(model, images, labels)
    mine = time.process_time() - mine
    return mine, processor_seconds(pids) - everybody - mine


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


if __name__ == "__main__":
    run_or_explain(main)
