"""The enclave's compiled passes on several threads beside one: seconds of one over those of several, by the clock.

    python benchmarks/threads.py [--threads 2] [--numbers 8] [--times 9] [--least]

numbers: millions in each operand. --least: the same passes from 2^14 numbers on, to see where a thread begins to pay.
*machine* is what threads gain here that share nothing and read little memory: on a busy machine, little or nothing.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable

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
    ratios = []
    for label, run in passes(numbers).items():
        alone, together = best(on(1, run), on(count, run), times=times)
        ratios.append(f"{label} {alone / together:.2f} ({1e3 * alone:.3g} ms)")
    print(f"{name}, one thread over {count}: {', '.join(ratios)}", flush=True)


def on(count: int, run: Callable[[], object]) -> Callable[[], object]:
    def runs() -> None:
        torch.set_num_threads(count)
        run()

    return runs


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
