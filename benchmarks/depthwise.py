"""MobileNetV2's depthwise convolutions: our kernel beside torch's, in its usual layout and in channels_last.

Milliseconds of one core, forward and backward (both gradients), best of several; and what a copy of the input takes.

    OMP_NUM_THREADS=1 python benchmarks/depthwise.py [--batch 16] [--kernel 3] [--times 7]
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from timing import best

from darknight.kernels import compiled_depthwise as kernels
from darknight.kernels.compiled_layers import Window
from darknight.runtime import keep_memory

# channels, rows and columns, step
LAYERS = [(32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2), (192, 28, 1), (192, 28, 2)]
LAYERS += [(384, 14, 1), (576, 14, 1), (576, 14, 2), (960, 7, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--kernel", type=int, default=3)
    parser.add_argument("--times", type=int, default=7)
    wish = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    library = kernels.chosen()
    if library is None:
        raise SystemExit("this installation has no compiled kernels: install it where there is a C compiler")
    print(f"{'layer':16} {'torch':>15} {'channels_last':>15} {'here':>15} {'copy':>6}   torch / here")
    sums = [0.0] * 7
    for channels, size, step in LAYERS:
        times = measured(library, wish.batch, channels, size, step, wish.kernel, wish.times)
        sums = [before + each for before, each in zip(sums, times, strict=True)]
        show(f"{channels} at {size}, step {step}", times)
    show("together", sums)


def measured(library: kernels.Library, batch: int, channels: int, size: int, step: int, kernel: int, times: int):
    """Forward and backward of torch, of torch in channels_last, and of ours; and a copy."""
    before = kernel // 2
    window = Window((kernel, kernel), (step, step), (before, before))
    x, w = torch.randn(batch, channels, size, size), torch.randn(channels, 1, kernel, kernel)
    grad = torch.randn(batch, channels, *window.outputs(size, size))
    runs = []
    for layout in (torch.contiguous_format, torch.channels_last):
        a, g = x.contiguous(memory_format=layout), grad.contiguous(memory_format=layout)
        runs += [
            lambda a=a: F.conv2d(a, w, None, step, before, 1, channels),
            lambda a=a, g=g: torch.ops.aten.convolution_backward(
                g, a, w, None, window.step, window.before, (1, 1), False, (0, 0), channels, (True, True, False)
            ),
        ]
    runs += [
        lambda: kernels.convolve(library, x, w, None, window),
        lambda: kernels.convolve_back(library, x, w, grad, window, (True, True, False)),
        x.clone,
    ]
    return [1e3 * each for each in best(*runs, times=times, clock=time.thread_time)]


def show(name: str, times: list[float]) -> None:
    pairs = " ".join(f"{times[at]:7.2f} {times[at + 1]:7.2f}" for at in (0, 2, 4))
    print(f"{name:16} {pairs} {times[6]:6.2f}   {times[0] / times[4]:.1f} {times[1] / times[5]:.1f}", flush=True)


if __name__ == "__main__":
    main()
