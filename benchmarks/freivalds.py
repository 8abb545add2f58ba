"""What does the check cost? Two-sided Freivalds in two fields at 40 bits, over the plain float32 pass, one core.

Target: at most 0.25 for the forward pass of Conv2d(64, 64, 3) at 56x56, batch 16. Plain passes and checks are timed in
turns, and the ratio is that of the best times. Plain is torch's usual layout; channels_last is shown as well, because
it is often faster.

    python benchmarks/freivalds.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import best

from darknight.coding import PRIME_28
from darknight.integrity import verified_forward, verified_grad_input, verified_grad_weight
from darknight.integrity.freivalds import repetitions
from darknight.ops import Conv
from darknight.randomness import Randomness

LAYERS = {
    "conv 64 at 56x56, batch 16": (64, 56),
    "conv 128 at 28x28, batch 16": (128, 28),
    "conv 256 at 14x14, batch 16": (256, 14),
    "conv 512 at 7x7, batch 16": (512, 7),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = Randomness.from_operating_system()
    op = Conv.make((3, 3), padding=1)
    for name, (channels, size) in LAYERS.items():
        shape = (16, channels, size, size)
        x = torch.randint(-1024, 1025, shape, dtype=torch.int32)
        delta = torch.randint(-60, 61, shape, dtype=torch.int32)
        w = torch.randint(-100, 101, (channels, channels, 3, 3), dtype=torch.int32)
        w_shape = tuple(w.shape)
        y = op.forward(x.double(), w.double()).to(torch.int32)
        gx = op.grad_input(delta.double(), w.double(), shape).to(torch.int32)
        gw = op.grad_weight(x.double(), delta.double(), w_shape).to(torch.int32)
        plan = repetitions(channels, PRIME_28)
        print(f"{name}: {plan.count} repetitions of {plan.bits}-bit vectors, {plan.soundness} bits")
        for layout in (torch.contiguous_format, torch.channels_last):
            xf, df, wf = (t.float().to(memory_format=layout) for t in (x, delta, w))
            rows: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
                (
                    "forward",
                    lambda xf=xf, wf=wf: op.forward(xf, wf),
                    lambda y=y, x=x, w=w: verified_forward(op, y, x, w, PRIME_28, generator.fresh()),
                ),
                (
                    "grad input",
                    lambda df=df, wf=wf, shape=shape: op.grad_input(df, wf, shape),
                    lambda gx=gx, d=delta, w=w, shape=shape: verified_grad_input(
                        op, gx, d, w, shape, PRIME_28, generator.fresh()
                    ),
                ),
                (
                    "grad weight",
                    lambda xf=xf, df=df, w_shape=w_shape: op.grad_weight(xf, df, w_shape),
                    lambda gw=gw, x=x, d=delta, w_shape=w_shape: verified_grad_weight(
                        op, gw, x, d, w_shape, PRIME_28, generator.fresh()
                    ),
                ),
            ]
            for kind, plain, check in rows:
                base, took = best(plain, check, times=11)
                label = "" if layout is torch.contiguous_format else " (plain in channels_last)"
                times = f"plain {base * 1e3:6.1f} ms   check {took * 1e3:6.1f} ms"
                print(f"  {kind:11} {times}   ratio {took / base:.3f}{label}")


if __name__ == "__main__":
    main()
