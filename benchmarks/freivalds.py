"""What does the check cost? Two-sided Freivalds over the plain float32 pass, all convolutions of ResNet-18, one core.

Target: summed over the 20 convolutions at 224x224, batch 16, forward, grad input (not of the image) and grad weight,
the check in the field (two fields, at least 40 bits for a layer call) takes at most 0.15 of the plain time. Plain
passes are timed in torch's usual layout and in channels_last, and the faster one counts; they and the check take turns,
and the best of 15 counts, in seconds of the processor. Every distinct layer is timed and counts as often as it occurs.
Beside it stand the same check without compiled kernels, as where there is no C compiler, and the check of Real, in
float64 and with 20 repetitions; they have no target. Takes two minutes, and exits with 1 if the target is missed.

    python benchmarks/freivalds.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from timing import best

from darknight.coding import PRIME_28
from darknight.integrity import real, verified_forward, verified_grad_input, verified_grad_weight
from darknight.kernels import compiled, compiled_sides, residues
from darknight.ops import Conv
from darknight.randomness import Randomness

BATCH = 16
TARGET = 0.15
_SPREAD = 1e-3  # of the Real check: what it is does not change the time

Run = Callable[[], object]


@dataclass(frozen=True)
class Layer:
    """A convolution with square kernel, input and stride, and how often ResNet-18 has it."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    size: int
    times: int
    image: bool = False  # its input needs no gradient

    def __str__(self) -> str:
        return f"{self.inputs:3} -> {self.outputs:3}, {self.kernel}x{self.kernel}/{self.stride} at {self.size:3}"


RESNET_18 = (
    Layer(3, 64, 7, 2, 224, 1, image=True),
    Layer(64, 64, 3, 1, 56, 4),
    Layer(64, 128, 3, 2, 56, 1),
    Layer(64, 128, 1, 2, 56, 1),
    Layer(128, 128, 3, 1, 28, 3),
    Layer(128, 256, 3, 2, 28, 1),
    Layer(128, 256, 1, 2, 28, 1),
    Layer(256, 256, 3, 1, 14, 3),
    Layer(256, 512, 3, 2, 14, 1),
    Layer(256, 512, 1, 2, 14, 1),
    Layer(512, 512, 3, 1, 7, 3),
)


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    assert sum(layer.times for layer in RESNET_18) == 20
    generator = Randomness.from_operating_system()
    print(f"{'layer':24} times  pass         plain ms   field ms  ratio  reference  ratio    Real ms  ratio")
    totals = [0.0, 0.0, 0.0, 0.0]
    for layer in RESNET_18:
        for kind, runs in _passes(layer, generator):
            usual, last, field = best(*runs[:3], times=15, clock=time.process_time)
            with patch.object(residues, "chosen", lambda: None), patch.object(compiled_sides, "chosen", lambda: None):
                (reference,) = best(runs[2], times=5, clock=time.process_time)
            (floats,) = best(runs[3], times=5, clock=time.process_time)
            took = [min(usual, last), field, reference, floats]
            totals = [total + layer.times * each for total, each in zip(totals, took, strict=True)]
            print(f"{layer!s:24} {layer.times:5}  {kind:11} {_columns(took)}")
    print(f"{'sum of 20 layers':24} {'':5}  {'':11} {_columns(totals)}")
    if not compiled.wanted():
        print(f"No compiled kernels here: the target of {TARGET} is for those.")
        return 0
    ratio = totals[1] / totals[0]
    print(f"field, compiled: {ratio:.3f} of plain; target {TARGET}: {'met' if ratio <= TARGET else 'MISSED'}")
    return 0 if ratio <= TARGET else 1


def _columns(took: list[float]) -> str:
    plain, *checks = took
    return f"{plain * 1e3:9.1f}" + "".join(f"  {check * 1e3:9.2f}  {check / plain:5.3f}" for check in checks)


def _passes(layer: Layer, generator: Randomness) -> list[tuple[str, tuple[Run, Run, Run, Run]]]:
    """By pass: plain in both layouts, the check in the field, the check in Real."""
    op = Conv.make((layer.kernel, layer.kernel), stride=layer.stride, padding=layer.kernel // 2)
    x_shape = (BATCH, layer.inputs, layer.size, layer.size)
    w_shape = (layer.outputs, layer.inputs, layer.kernel, layer.kernel)
    x = torch.randint(-1024, 1025, x_shape, dtype=torch.int32)
    w = torch.randint(-100, 101, w_shape, dtype=torch.int32)
    delta = torch.randint(-60, 61, op.output_shape(x_shape, w_shape), dtype=torch.int32)
    xd, wd, dd = (tensor.double() for tensor in (x, w, delta))
    yd, gxd, gwd = op.forward(xd, wd), op.grad_input(dd, wd, x_shape), op.grad_weight(xd, dd, w_shape)
    y, gx, gw = (tensor.to(torch.int32) for tensor in (yd, gxd, gwd))
    floats = [
        [tensor.float().to(memory_format=layout) for tensor in (x, w, delta)]
        for layout in (torch.contiguous_format, torch.channels_last)
    ]
    fresh = generator.fresh
    passes: list[tuple[str, tuple[Run, Run, Run, Run]]] = [
        (
            "forward",
            (
                lambda: op.forward(floats[0][0], floats[0][1]),
                lambda: op.forward(floats[1][0], floats[1][1]),
                lambda: verified_forward(op, y, x, w, PRIME_28, fresh()),
                lambda: real.verified_forward(op, yd, xd, wd, fresh(), spread=_SPREAD),
            ),
        ),
        (
            "grad input",
            (
                lambda: op.grad_input(floats[0][2], floats[0][1], x_shape),
                lambda: op.grad_input(floats[1][2], floats[1][1], x_shape),
                lambda: verified_grad_input(op, gx, delta, w, x_shape, PRIME_28, fresh()),
                lambda: real.verified_grad_input(op, gxd, dd, wd, x_shape, fresh(), spread=_SPREAD),
            ),
        ),
        (
            "grad weight",
            (
                lambda: op.grad_weight(floats[0][0], floats[0][2], w_shape),
                lambda: op.grad_weight(floats[1][0], floats[1][2], w_shape),
                lambda: verified_grad_weight(op, gw, x, delta, w_shape, PRIME_28, fresh()),
                lambda: real.verified_grad_weight(op, gwd, xd, dd, w_shape, fresh(), spread=_SPREAD),
            ),
        ),
    ]
    return [each for each in passes if not (layer.image and each[0] == "grad input")]


if __name__ == "__main__":
    sys.exit(main())
