"""Which prime and how many bits? Precision, overflows and worker cost on layers of VGG16 and ResNet152.

Precision needs no workers: decoding is exact, so the masked result is the quantised one. For each layer, distribution
and field this prints the bits that inputs and gradients kept, the forward error (max |difference| / max |plain|), the
cosines of both gradients, and how many results wrapped around. Cost is the time of a worker's three passes on
full-range shares, over the plain float32 passes, in the same run; a fully connected layer at a small batch only
converts weights, which a worker does once a step.

    python benchmarks/field_precision.py [--batch 8]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from timing import best
from torch import Tensor

from darknight.coding import PRIME_25, PRIME_28
from darknight.coding.fixed_point import bits_over, exponent_for, largest_magnitude, rms
from darknight.kernels import quantise_nearest, quantise_stochastic
from darknight.ops import BilinearOp, Conv, Linear, field
from darknight.randomness import rounding_of, words_of

THREE, ONE = Conv.make((3, 3), padding=1), Conv.make((1, 1))
LAYERS: dict[str, tuple[BilinearOp, tuple[int, ...], tuple[int, ...]]] = {
    "vgg16 conv 64 at 112": (THREE, (64, 112, 112), (128, 64, 3, 3)),
    "vgg16 conv 256 at 56": (THREE, (256, 56, 56), (256, 256, 3, 3)),
    "vgg16 conv 512 at 14": (THREE, (512, 14, 14), (512, 512, 3, 3)),
    "vgg16 fc 25088": (Linear(), (25088,), (4096, 25088)),
    "resnet152 stem 7x7": (Conv.make((7, 7), stride=2, padding=3), (3, 224, 224), (64, 3, 7, 7)),
    "resnet152 conv 256 at 14": (THREE, (256, 14, 14), (256, 256, 3, 3)),
    "resnet152 1x1 1024 at 14": (ONE, (1024, 14, 14), (256, 1024, 1, 1)),
    "resnet152 1x1 2048 at 7": (ONE, (2048, 7, 7), (512, 2048, 1, 1)),
}
FIELDS = [(PRIME_25, 9), (PRIME_25, 10), (PRIME_28, 10), (PRIME_28, 11)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    batch = parser.parse_args().batch
    torch.manual_seed(0)
    print(f"{'layer':26} {'inputs':7} {'field':11} x bits d bits  forward   gx cosine   gw cosine   wrapped y/gx/gw")
    for name, (op, features, w_shape) in LAYERS.items():
        x, w, delta = example(op, (batch, *features), w_shape)
        for kind, inputs in (("normal", x), ("relu", F.relu(x))):
            reference = passes(op, inputs.double(), w.double(), delta.double())
            for prime, bits in FIELDS:
                found = precision(op, inputs, w, delta, reference, prime, bits)
                print(f"{name:26} {kind:7} {label(prime, bits):11} {found}")
    print()
    torch.set_num_threads(1)
    print("worker time over plain float32, one core (forward, grad input, grad weight)")
    for name, (op, features, w_shape) in LAYERS.items():
        x, w, delta = example(op, (max(1, batch // 4), *features), w_shape)
        plain = best(*plain_passes(op, x, w, delta), times=3)
        for prime in (PRIME_25, PRIME_28):
            times = best(*field_passes(op, x, w, delta, prime), times=3)
            ratios = "  ".join(f"{took / base:5.2f}" for took, base in zip(times, plain, strict=True))
            print(f"{name:26} {label(prime, 10):11} {ratios}")


def example(op: BilinearOp, x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal inputs and gradients, torch's default uniform weights (large for their maximum: a hard case)."""
    x = torch.randn(x_shape)
    w = (torch.rand(w_shape) * 2 - 1) / prod(w_shape[1:]) ** 0.5
    return x, w, torch.randn(op.output_shape(x_shape, w_shape)) * 1e-3


def passes(op: BilinearOp, x: Tensor, w: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return op.forward(x, w), op.grad_input(delta, w, tuple(x.shape)), op.grad_weight(x, delta, tuple(w.shape))


def precision(
    op: BilinearOp, x: Tensor, w: Tensor, delta: Tensor, reference: tuple[Tensor, ...], prime: int, bits: int
) -> str:
    rows = x.shape[0] * op.positions(tuple(x.shape), tuple(delta.shape))
    ew = exponent_for(largest_magnitude(w), bits)
    wq = quantise_nearest(w, ew)
    full_x = exponent_for(largest_magnitude(x), bits)
    ex = full_x - bits_over(rms(x) * 2.0**full_x, rms(wq), prod(w.shape[1:]), prime)
    xq = quantise_nearest(x, ex)
    full_d = exponent_for(largest_magnitude(delta), bits)
    size = rms(delta) * 2.0**full_d
    lowered = max(bits_over(size, rms(wq), prod(w.shape) // w.shape[1], prime), bits_over(size, rms(xq), rows, prime))
    ed = full_d - lowered
    dq = quantise_stochastic(delta, ed, words_of(rounding_of(seed=0, layer="", call=0, kind="delta"), delta.shape))
    results = passes(op, xq.double(), wq.double(), dq.double())
    wraps = [int((result.abs() > prime // 2).sum()) for result in results]
    scales = (ex + ew, ed + ew, ex + ed)
    y, gx, gw = (wrapped(result, prime) * 2.0**-scale for result, scale in zip(results, scales, strict=True))
    forward = float((y - reference[0]).abs().max() / reference[0].abs().max())
    cosines = [
        float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a, b in ((gx, reference[1]), (gw, reference[2]))
    ]
    kept = f"{bits - (full_x - ex):6d} {bits - lowered:6d}"
    return f"{kept}  {forward:.6f}  {cosines[0]:.8f}  {cosines[1]:.8f}  {wraps[0]}/{wraps[1]}/{wraps[2]}"


def wrapped(values: Tensor, prime: int) -> Tensor:
    return torch.remainder(values + prime // 2, prime) - prime // 2


def plain_passes(op: BilinearOp, x: Tensor, w: Tensor, delta: Tensor) -> list[Callable[[], Tensor]]:
    return [
        lambda: op.forward(x, w),
        lambda: op.grad_input(delta, w, tuple(x.shape)),
        lambda: op.grad_weight(x, delta, tuple(w.shape)),
    ]


def field_passes(op: BilinearOp, x: Tensor, w: Tensor, delta: Tensor, prime: int) -> list[Callable[[], Tensor]]:
    share = torch.randint(0, prime, x.shape, dtype=torch.int32)
    masked = torch.randint(0, prime, delta.shape, dtype=torch.int32)
    wq = quantise_nearest(w, exponent_for(largest_magnitude(w), 10))
    return [
        lambda: field.forward(op, share, wq, prime),
        lambda: field.grad_input(op, masked, wq, tuple(x.shape), prime),
        lambda: field.grad_weight(op, share, masked, tuple(w.shape), prime),
    ]


def label(prime: int, bits: int) -> str:
    return f"2^{prime.bit_length()}, {bits} bit"


if __name__ == "__main__":
    main()
