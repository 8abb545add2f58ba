"""1x1 convolutions of MobileNetV2 and ResNet, as products of matrices and as torch's convolutions, in its two layouts.

Milliseconds of one core, best of several: forward, the gradient of the input, that of the weight. The layers that stay
in the enclave are in torch's usual layout; channels last is beside it because a plain step may choose.

    OMP_NUM_THREADS=1 python benchmarks/one_by_one.py [--batch 16] [--times 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from timing import best
from torch import Tensor

from darknight.nn.one_by_one import pointwise
from darknight.runtime import keep_memory

# channels in and out, side of the images
LAYERS = [
    (32, 16, 112),
    (16, 96, 112),
    (96, 24, 56),
    (24, 144, 56),
    (144, 24, 56),
    (64, 256, 56),
    (256, 64, 56),
    (32, 192, 28),
    (192, 32, 28),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--times", type=int, default=7)
    wish = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    print(f"{'layer':18} {'torch':>23} {'channels last':>23} {'here':>23}   torch / here")
    sums = [0.0] * 9
    for inputs, outputs, side in LAYERS:
        times = measured(wish.batch, inputs, outputs, side, wish.times)
        sums = [before + each for before, each in zip(sums, times, strict=True)]
        show(f"{inputs} to {outputs} at {side}", times)
    show("together", sums)


def measured(batch: int, inputs: int, outputs: int, side: int, times: int) -> list[float]:
    """Forward and both gradients: of torch, of torch with channels last, and here."""
    x, weight = torch.randn(batch, inputs, side, side), torch.randn(outputs, inputs, 1, 1)
    usual = [x, weight, torch.randn(batch, outputs, side, side)]
    last = [each.to(memory_format=torch.channels_last) for each in usual]
    runs = [*_of_torch(*usual), *_of_torch(*last), *_here(*usual)]
    return [1e3 * each for each in best(*runs, times=times, clock=time.thread_time)]


def _of_torch(x: Tensor, weight: Tensor, grad: Tensor) -> list[Callable[[], object]]:
    def back(for_x: bool) -> object:
        wanted = [for_x, not for_x, False]
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted
        )

    return [lambda: torch.conv2d(x, weight), lambda: back(True), lambda: back(False)]


def _here(x: Tensor, weight: Tensor, grad: Tensor) -> list[Callable[[], object]]:
    def back(for_x: bool) -> Callable[[], object]:
        operands = x.detach().requires_grad_(for_x), weight.detach().requires_grad_(not for_x)
        y = pointwise(torch.conv2d, operands, {})
        assert y is not None, "it is made for these"
        return lambda: torch.autograd.grad(y, operands[not for_x], grad, retain_graph=True)

    return [lambda: pointwise(torch.conv2d, (x, weight), {}), back(True), back(False)]


def show(name: str, times: list[float]) -> None:
    groups = " ".join(" ".join(f"{each:7.2f}" for each in times[at : at + 3]) for at in (0, 3, 6))
    ratios = " ".join(f"{times[at] / times[at + 6]:.2f}" for at in range(3))
    print(f"{name:18} {groups}   {ratios}", flush=True)


if __name__ == "__main__":
    main()
