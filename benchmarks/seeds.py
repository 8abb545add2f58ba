"""What it spares the enclave that noise rows go out as seeds: bytes sent, and seconds of its processor.

Steps of the same protected network alternate between both, in one process, over the same workers. Without: every share
is made, written and sent, as if no code had carriers. The median of each, and of the ratios of neighbouring steps.

Run: python benchmarks/seeds.py [vgg16] [--batch 8] [--size 64] [--links shm|sealed] [--times 9]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from darknight.bench.ceiling import SCHEMES
from darknight.bench.links import LINKS, fleet_over
from darknight.bench.steps import examples, network, step_of
from darknight.coding import Mixing, draw_code
from darknight.nn import protect_
from darknight.randomness import Randomness
from darknight.runtime import Runtime, keep_memory
from darknight.runtime.threads import one_thread

_PATIENCE = 3600.0


def carriers(mixings: tuple[Mixing, ...], *, seeds: bool) -> None:
    """Whether the code knows which shares are a noise row; it is public, fixed and kept, so all maskings see it."""
    for mixing in mixings:
        vars(mixing).pop("carriers", None)
        if not seeds:
            vars(mixing)["carriers"] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="vgg16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--links", choices=sorted(LINKS), default="shm")
    parser.add_argument("--times", type=int, default=9)
    asked = parser.parse_args()
    scheme = SCHEMES["field"]
    mixings = draw_code(scheme, Randomness.from_operating_system().fresh()).masking
    images, labels = examples(asked.batch, asked.size)
    keep_memory()
    model, seconds, sent = network(asked.model, asked.size), {True: [], False: []}, {True: 0, False: 0}
    with one_thread(), fleet_over(asked.links, scheme, patience=_PATIENCE) as fleet, Runtime(scheme, fleet) as runtime:
        names = {row.name for row in protect_(model, runtime).masked}
        step = step_of(model, images, labels, training=True)
        for count in range(asked.times + 1):
            for seeds in (True, False) if count % 2 else (False, True):
                carriers(mixings, seeds=seeds)
                before, begun = runtime.ledger.sent_bytes, time.process_time()
                step()
                if count:
                    seconds[seeds].append(time.process_time() - begun)
                    sent[seeds] = runtime.ledger.sent_bytes - before
    carriers(mixings, seeds=True)
    ratios = [one / other for one, other in zip(seconds[True], seconds[False], strict=True)]
    print(f"{asked.model}, batch {asked.batch}, {asked.size}x{asked.size}, {asked.links}, {asked.times} rounds")
    weights = scheme.workers * sum(model.get_submodule(name).weight.nbytes for name in names)
    print(f"bytes of weights    {weights:,} a step, as counted for each worker")
    shares = {seeds: nbytes - weights for seeds, nbytes in sent.items()}
    print(f"bytes of shares     {shares[False]:,} without, {shares[True]:,} with: {shares[True] / shares[False]:.3f}")
    print(f"enclave's processor {median(seconds[False]):.3f} s without, {median(seconds[True]):.3f} s with")
    best = min(seconds[True]) / min(seconds[False])
    print(f"with over without   {median(ratios):.3f} (median of neighbours), {best:.3f} (best of each)")


if __name__ == "__main__":
    main()
