"""How fast are a worker's ways to compute a pass in the field? Each over the plain float32 pass, one core.

For layers as in ResNet-50, VGG-16 and MobileNet: forward, grad input and grad weight of a share of 4 examples, by every
strategy that takes them, beside plain float32 (the faster of torch's two layouts). All take turns, and the best of 3
counts, in seconds of the processor. The last column is what a worker takes that may choose; before there was a choice,
it took the first. Takes three minutes.

    OMP_NUM_THREADS=1 python benchmarks/strategies.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from timing import best

from darknight.coding import PRIME_28
from darknight.ops import BilinearOp, Conv, Linear
from darknight.ops.strategy import STRATEGIES, Work
from darknight.types import Pass

LARGEST = 1023  # of a weight in ten bits
GROUPS = 4
TIMES = 3

LAYERS: list[tuple[str, BilinearOp, tuple[int, ...], tuple[int, ...]]] = [
    ("3x3, 64 -> 64 at 56", Conv.make((3, 3), padding=1), (64, 56, 56), (64, 64, 3, 3)),
    ("3x3, 128 -> 128 at 28", Conv.make((3, 3), padding=1), (128, 28, 28), (128, 128, 3, 3)),
    ("3x3/2, 128 -> 256 at 28", Conv.make((3, 3), padding=1, stride=2), (128, 28, 28), (256, 128, 3, 3)),
    ("3x3, 512 -> 512 at 7", Conv.make((3, 3), padding=1), (512, 7, 7), (512, 512, 3, 3)),
    ("1x1, 256 -> 64 at 56", Conv.make((1, 1)), (256, 56, 56), (64, 256, 1, 1)),
    ("1x1, 512 -> 2048 at 7", Conv.make((1, 1)), (512, 7, 7), (2048, 512, 1, 1)),
    ("7x7/2, 3 -> 64 at 224", Conv.make((7, 7), padding=3, stride=2), (3, 224, 224), (64, 3, 7, 7)),
    ("3x3, 64 -> 64 at 224", Conv.make((3, 3), padding=1), (64, 224, 224), (64, 64, 3, 3)),
    ("depthwise 3x3, 256 at 28", Conv.make((3, 3), padding=1, groups=256), (256, 28, 28), (256, 1, 3, 3)),
    ("linear 4096 -> 4096", Linear(), (4096,), (4096, 4096)),
]

Run = Callable[[], object]


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = list(STRATEGIES)
    print(f"{'layer':26} {'pass':12} {'plain ms':>9}" + "".join(f" {name:>16}" for name in names) + f" {'best':>6}")
    sums: dict[str, list[float]] = {}
    for label, op, x_shape, w_shape in LAYERS:
        for kind in Pass:
            plain, found = _measured(op, kind, (GROUPS, *x_shape), w_shape)
            shortest = min(found.values())
            columns = "".join(f" {found[name] / plain:16.2f}" if name in found else f" {'-':>16}" for name in names)
            print(f"{label:26} {kind.value:12} {plain * 1e3:9.2f}{columns} {shortest / plain:6.2f}", flush=True)
            for name, each in {**found, "plain": plain, "best": shortest}.items():
                sums.setdefault(name, []).append(each)
    total = sum(sums["plain"])
    print(f"sum of all: float64 {sum(sums['float64']) / total:.2f}, best {sum(sums['best']) / total:.2f} of plain")
    return 0


def _measured(
    op: BilinearOp, kind: Pass, x_shape: tuple[int, ...], w_shape: tuple[int, ...]
) -> tuple[float, dict[str, float]]:
    x = torch.randint(0, PRIME_28, x_shape, dtype=torch.int32)
    w = torch.randint(-LARGEST, LARGEST + 1, w_shape, dtype=torch.int32)
    delta = torch.randint(0, PRIME_28, op.output_shape(x_shape, w_shape), dtype=torch.int32)
    work = Work(op=op, kind=kind, x_shape=x_shape, w_shape=w_shape, prime=PRIME_28, largest=LARGEST)
    operands = {Pass.FORWARD: (x, w), Pass.GRAD_INPUT: (delta, w), Pass.GRAD_WEIGHT: (x, delta)}[kind]
    layouts = [torch.contiguous_format, *([torch.channels_last] if x.dim() == 4 else [])]
    runs = [_plain(op, kind, *(each.float().to(memory_format=layout) for each in (x, w, delta))) for layout in layouts]
    offered = [each for each in STRATEGIES.values() if each.takes(work, x.device)]
    took = best(
        *runs,
        *(lambda each=each: each.compute(work, *operands) for each in offered),
        times=TIMES,
        clock=time.process_time,
    )
    return min(took[: len(runs)]), {each.name: time for each, time in zip(offered, took[len(runs) :], strict=True)}


def _plain(op: BilinearOp, kind: Pass, x: torch.Tensor, w: torch.Tensor, delta: torch.Tensor) -> Run:
    if kind is Pass.FORWARD:
        return lambda: op.forward(x, w)
    if kind is Pass.GRAD_INPUT:
        return lambda: op.grad_input(delta, w, tuple(x.shape))
    return lambda: op.grad_weight(x, delta, tuple(w.shape))


if __name__ == "__main__":
    sys.exit(main())
