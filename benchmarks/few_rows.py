"""VGG16's fully connected layers: our kernels for few rows beside torch's, and what reading their weights once takes.

Milliseconds of one core, best of several: forward, the gradient of the input, that of weight and bias, and a step of
torch's fused SGD that reads the gradient which was written last.

    OMP_NUM_THREADS=1 python benchmarks/few_rows.py [--rows 8] [--times 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from darknight.kernels import compiled_few_rows as kernels
from darknight.runtime import keep_memory

# inputs, outputs
LAYERS = [(25088, 4096), (4096, 4096), (4096, 1000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--times", type=int, default=7)
    wish = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    library = kernels.chosen()
    if library is None:
        raise SystemExit("this installation has no compiled kernels: install it where there is a C compiler")
    print(f"{'layer':14} {'torch':>31} {'here':>31} {'read':>6}   torch / here")
    sums = [0.0] * 9
    for inputs, outputs in LAYERS:
        times = measured(library, wish.rows, inputs, outputs, wish.times)
        sums = [before + each for before, each in zip(sums, times, strict=True)]
        show(f"{inputs} to {outputs}", times)
    show("together", sums)


def measured(library: kernels.Library, rows: int, inputs: int, outputs: int, times: int) -> list[float]:
    """Forward, both gradients and a step of torch, the same with ours; and a sum of the weights."""
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    grad, parameter = torch.randn(rows, outputs), torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([parameter], lr=1e-6, fused=True)

    def by_torch() -> Tensor:
        grad.sum(0)
        return grad.t() @ x

    def by_ours() -> Tensor:
        found = kernels.multiply_back(library, x, weight, grad, (False, True, True))
        assert found is not None
        assert found[1] is not None
        return found[1]

    runs: list[Callable[[], object]] = [lambda: F.linear(x, weight, bias), lambda: grad @ weight]
    runs += [lambda: kernels.multiply(library, x, weight, bias)]
    runs += [lambda: kernels.multiply_back(library, x, weight, grad, (True, False, False)), weight.sum]
    shortest = [float("inf")] * 9
    for _ in range(times):
        for place, run in zip((0, 1, 4, 5, 8), runs, strict=True):
            shortest[place] = min(shortest[place], seconds(run))
        for place, derived in ((2, by_torch), (6, by_ours)):

            def derive(derived: Callable[[], Tensor] = derived) -> None:
                parameter.grad = derived()

            shortest[place] = min(shortest[place], seconds(derive))
            shortest[place + 1] = min(shortest[place + 1], seconds(optimizer.step))
            parameter.grad = None
    return [1e3 * each for each in shortest]


def seconds(run: Callable[[], object]) -> float:
    begun = time.thread_time()
    run()
    return time.thread_time() - begun


def show(name: str, times: list[float]) -> None:
    groups = " ".join(" ".join(f"{each:7.2f}" for each in times[at : at + 4]) for at in (0, 4))
    ratios = " ".join(f"{times[at] / times[at + 4]:.1f}" for at in range(4))
    print(f"{name:14} {groups} {times[8]:6.2f}   {ratios}", flush=True)


if __name__ == "__main__":
    main()
