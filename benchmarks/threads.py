"""The enclave's compiled passes on several threads beside one.

    python benchmarks/threads.py [--threads 2] [--numbers 8] [--times 9] [--least]

Two ratios for each pass: *clock*, the time that passes with one thread over that with several; and *path*, the same of
processor time, where of parts that may run at once the longest counts, and everything that is not in a part. The clock
comes to the path, less what it takes to wake a thread, where the cores are free; *machine* says whether they were: what
threads gain by the clock that share nothing and read little memory.

numbers: millions in each operand. --least: the same passes from 2^14 numbers on, to see where a thread begins to pay.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from threading import get_ident

import torch
from timing import best

from darknight.kernels import Weighing, encode, largest_magnitude, residues, threads, unmask_weighed
from darknight.kernels import compiled_layers as layers
from darknight.runtime import keep_memory

PRIME, OTHER = 2**28 - 57, 2**28 - 89
INPUTS, CHANNELS, EXAMPLES = 4, 64, 8
LEAST = (14, 15, 16, 17, 18, 19, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--numbers", type=float, default=8.0)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--least", action="store_true")
    wish = parser.parse_args()
    if layers.chosen() is None:
        raise SystemExit("this installation has no compiled kernels: install it where there is a C compiler")
    keep_memory()
    if not wish.least:
        show(f"{wish.numbers:g} million", wish.numbers * 1e6, wish.threads, wish.times)
        return
    threads._EACH = 1
    for size in LEAST:
        show(f"2^{size} numbers", 2.0**size, wish.threads, 20 * wish.times)


def show(name: str, numbers: float, count: int, times: int) -> None:
    print(f"{name}, one thread over {count}:")
    for label, run in passes(numbers).items():
        clock = best(on(1, run), on(count, run), times=times)
        path = [min(longest(on(each, run)) for _ in range(times)) for each in (1, count)]
        print(f"    {label:12} clock {clock[0] / clock[1]:.2f}   path {path[0] / path[1]:.2f}   ", end="")
        print(f"{1e3 * path[0]:.3g} ms with one", flush=True)


def on(count: int, run: Callable[[], object]) -> Callable[[], object]:
    def runs() -> None:
        torch.set_num_threads(count)
        run()

    return runs


def longest(run: Callable[[], object]) -> float:
    """Processor time of this thread without its parts, and of the longest part of each pass, whoever did it."""
    split, mine, longest_parts = threads.split, 0.0, 0.0

    def timed(does, length, numbers, step=1):
        nonlocal mine, longest_parts
        parts: list[tuple[int, float]] = []

        def part(first, last):
            start = time.thread_time()
            found = does(first, last)
            parts.append((get_ident(), time.thread_time() - start))
            return found

        found = split(part, length, numbers, step)
        here = get_ident()
        mine += sum(spent for who, spent in parts if who == here)
        longest_parts += max(spent for _, spent in parts)
        return found

    threads.split = timed
    try:
        start = time.thread_time()
        run()
        return time.thread_time() - start - mine + longest_parts
    finally:
        threads.split = split


def passes(numbers: float) -> dict[str, Callable[[], object]]:
    """By name: what a layer of K=4, M=1 does with (example, channel, position); and hashes."""
    positions, groups = max(1, round(numbers / EXAMPLES / CHANNELS)), EXAMPLES // INPUTS
    x = torch.randn(EXAMPLES, CHANNELS, positions).clamp_(-3.9, 3.9)
    noise = torch.randint(0, PRIME, (1, groups, CHANNELS, positions), dtype=torch.int32)
    data = [[int(i == j) for i in range(INPUTS)] + [1] for j in range(INPUTS)]
    shares = [torch.empty(groups, CHANNELS, positions, dtype=torch.int32) for _ in range(INPUTS + 2)]
    answers = [torch.randint(0, PRIME, (groups, CHANNELS, positions), dtype=torch.int32) for _ in range(INPUTS + 1)]
    decoding = [[int(i == j) for i in range(INPUTS)] + [-1] for j in range(INPUTS)]
    floats, whole = torch.empty_like(x), torch.randint(-1000, 1000, x.shape, dtype=torch.int32)
    u, v = (torch.randint(-(1 << 20), 1 << 20, (2, n)).to(torch.float64) for n in (CHANNELS, EXAMPLES))
    how = Weighing(channels=u, rows=v, positions=positions, primes=(PRIME, OTHER), longest=16, often=16)
    library, ones = layers.chosen(), torch.ones(CHANNELS)
    assert library is not None
    mix = [*data, [1] * INPUTS + [5], [0] * INPUTS + [1]]
    block = bytes(max(1, round(numbers / 8)))

    def hashed(first: int, last: int) -> None:
        for _ in range(first, last):
            hashlib.sha256(block).digest()

    return {
        "machine": lambda: threads.split(hashed, 8, round(numbers)),
        "encode": lambda: encode(x, 8, None, mix, noise, PRIME, inputs=INPUTS, largest=1024, outs=shares, keep=False),
        "unmask": lambda: unmask_weighed(decoding, answers, PRIME, 9, floats=floats, weighing=how),
        "weigh": lambda: residues.weigh(whole, u, (PRIME, OTHER), longest=16),
        "largest": lambda: largest_magnitude(x),
        "batch norm": lambda: layers.normalise(library, x, ones, ones, None, 0.1, 1e-5, (0.0, 6.0)),
    }


if __name__ == "__main__":
    main()
