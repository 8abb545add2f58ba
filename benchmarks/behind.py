"""What stands behind a layer and comes back through it: our kernels beside a copy of as many bytes as they move.

Milliseconds of one core, best of several, each after memory that is larger than the cache was read; and what that is of
a copy. A normalisation reads x twice, but finds it near the second time: each tensor counts once.

    OMP_NUM_THREADS=1 python benchmarks/behind.py [--batch 8] [--times 9]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from timing import best

from darknight.kernels import compiled_layers as kernels
from darknight.kernels.compiled_layers import Window
from darknight.runtime import keep_memory

PLANES = [(64, 224), (256, 56), (512, 28), (1024, 14)]  # channels, rows and columns
RELU = (0.0, float("inf"))
ELSEWHERE = 64 << 20  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--times", type=int, default=9)
    wish = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    library = kernels.chosen()
    if library is None:
        raise SystemExit("this installation has no compiled kernels: install it where there is a C compiler")
    emptied = partial(torch.zeros(ELSEWHERE, dtype=torch.uint8).add_, 1)
    for channels, size in PLANES:
        runs = passes(library, wish.batch, channels, size)
        for name, (run, nbytes) in runs.items():
            source, target = torch.ones(nbytes // 2, dtype=torch.uint8), torch.ones(nbytes // 2, dtype=torch.uint8)
            copied = partial(target.copy_, source)
            turns = best(emptied, run, emptied, copied, times=wish.times, clock=time.thread_time)
            ours, copy = turns[1], turns[3]
            print(f"{channels:5} at {size:3}  {name:24} {1e3 * ours:7.2f} ms  {ours / copy:5.2f} of a copy")


Runs = dict[str, tuple[Callable[[], object], int]]


def passes(library: kernels.Library, batch: int, channels: int, size: int) -> Runs:
    """By name: the pass, and how many bytes it reads and writes."""
    x, grad = (torch.randn(batch, channels, size, size) for _ in range(2))
    ones, zeros = torch.ones(channels), torch.zeros(channels)
    running = torch.zeros(channels), torch.ones(channels)
    made = kernels.normalise(library, x, ones, zeros, running, 0.1, 1e-5, RELU)
    window = Window((2, 2), (2, 2), (0, 0))
    pooled = kernels.pool(library, x, window, keep=True)
    assert made is not None
    assert pooled is not None
    assert pooled[1] is not None
    by, taps, smaller = made[1], pooled[1], torch.randn_like(pooled[0])
    return {
        "normalise": (lambda: kernels.normalise(library, x, ones, zeros, running, 0.1, 1e-5, RELU), 2 * x.nbytes),
        "normalise, back": (lambda: kernels.derive(library, x, grad, by, RELU), 3 * x.nbytes),
        "activation, back": (lambda: kernels.come_back(library, grad, 1, x, RELU), 3 * x.nbytes),
        "pool 2x2": (lambda: kernels.pool(library, x, window, keep=True), x.nbytes + smaller.nbytes + taps.nbytes),
        "pool 2x2, back": (
            lambda: kernels.unpool(library, smaller, taps, x.shape, window),
            x.nbytes + smaller.nbytes + taps.nbytes,
        ),
    }


if __name__ == "__main__":
    main()
