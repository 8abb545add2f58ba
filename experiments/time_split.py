"""Where the time of a training step goes: enclave against workers, linear against non-linear (the paper's Figure 2).

For each network one step (forward, backward, SGD) in turns: everything in the enclave, which is the plain step, and
protected, by worker processes on this machine. All times are seconds of processors over those of the plain step of the
same run, the best of several rounds, one thread on each side. What is linear in the plain step (convolutions, matrix
products and their gradients) is what torch's profiler says of one more.

    python experiments/time_split.py --out results/time-split.json                      # VGG16, ResNet152, MobileNetV2
    python experiments/time_split.py --out results/time-split.json --model mobilenet-v2
    python experiments/time_split.py --out /tmp/quick.json --quick                      # a small network, in a minute

At 224x224 VGG16 and ResNet152 take more than 10 GB and a quiet machine. The ratio of the plain step to the enclave's
part is the most that any number of fast workers can give; no GPU takes part, so no other speed-up is claimed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from recording import Recording, run_or_explain
from settings import chosen
from torch.profiler import ProfilerActivity, profile

from darknight.bench import LEAST_TIMES, SCHEMES, measure_ceiling
from darknight.bench.ceiling import KEPT, THREADS
from darknight.bench.steps import OPTIMIZER, examples, network, step_of
from darknight.ops.place import STRUCTURE

BATCHES = {"vgg16": 8, "resnet152": 8, "mobilenet-v2": 16}
QUICK = "resnet-small"
# What phases of the enclave are for; whatever has another name is part of masking.
PARTS = {
    "check": "checking",
    "checksum": "checking",
    "send": "links",
    "send weights": "links",
    "receive": "links",
    THREADS: "links",
    KEPT: "staying",
    OPTIMIZER: "optimizer",
}
LINEAR = ("conv", "mm", "linear")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file, which is resumed if it is there")
    parser.add_argument("--model", action="append", help=f"of {', '.join(BATCHES)}; may be repeated (default: all)")
    parser.add_argument("--size", type=int, default=224, help="pixels a side (default: 224)")
    parser.add_argument("--batch", type=int, help="examples in a step (default: 8 for vgg16 and resnet152, else 16)")
    parser.add_argument("--scheme", choices=list(SCHEMES), default="field", help="default: field (K=4, M=1)")
    parser.add_argument("--times", type=int, default=LEAST_TIMES, help=f"rounds (default: {LEAST_TIMES})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} at 32x32, batch 4: to see that it works")
    flags = parser.parse_args()
    if flags.quick:
        flags.size, flags.batch, flags.times = 32, flags.batch or 4, 1
    models = [QUICK] if flags.quick else chosen(flags.model, BATCHES, "model")
    scale = {"size": flags.size, "times": flags.times, "scheme": flags.scheme, "links": "shm", "place": STRUCTURE}
    run = Recording("time-split", flags.out, scale=scale, planned=models)
    for model in run.missing:
        run.add(model, measured(model, flags.batch or BATCHES[model], flags, run))


def measured(model: str, batch: int, flags: argparse.Namespace, run: Recording) -> dict[str, Any]:
    """One cell: everything over the plain step."""
    found = measure_ceiling(
        model,
        batch=batch,
        size=flags.size,
        times=flags.times,
        scheme=SCHEMES[flags.scheme],
        tell=lambda text: run.tell(f"{model}: {text}"),
    )
    linear = linear_share(model, batch, flags.size, found.layout)
    enclave = dict.fromkeys(("masking", "checking", "links", "staying", "optimizer"), 0.0)
    for name, seconds in found.phases.items():
        enclave[PARTS.get(name, "masking")] += seconds / found.plain
    return {
        "model": model,
        "batch": batch,
        "plain": {"linear": linear, "non_linear": 1.0 - linear},
        "enclave": enclave,
        "workers": max(0.0, found.processors - found.enclave / found.plain),
        "wall": found.wall,
        "ceiling": found.ratio,
        "masked_layers": len(found.masked),
        "phases": [{"name": name, "share": seconds / found.enclave} for name, seconds in found.phases.items()],
    }


def linear_share(model: str, batch: int, size: int, layout: str) -> float:
    """Of the plain step's time, what convolutions, matrix products and their gradients take."""
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    torch.set_num_threads(1)
    images, labels = examples(batch, size)
    plain = network(model, size).to(memory_format=form)  # type: ignore[call-overload]
    step = step_of(plain, images.to(memory_format=form), labels, training=True)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    linear = sum(spent for name, spent in times.items() if is_linear(name))
    return float(linear / sum(times.values()))


def is_linear(name: str) -> bool:
    """aten::mkldnn_convolution, aten::convolution_backward, aten::addmm and their like."""
    return name.startswith("aten::") and any(part in name for part in LINEAR)


if __name__ == "__main__":
    run_or_explain(main)
