"""What does a step cost between the gradients and the next product? The optimizer, and the weights as workers get them.

For the matrices and kernels of a network, one thread, seconds of the processor over a copy of the weights; the best of
7, in turns. *passes apart* is what the weights took as passes of their own: largest magnitude, integers, those of the
step before in int16, and moments. *one pass* is what they take. *compared* is what it takes to see that integers are
still those of the weights: what an optimizer that made them itself would not spare (docs/adr/0027). Has no target.

    OMP_NUM_THREADS=1 python benchmarks/new_weights.py              # VGG16 and ResNet152; two minutes, 4 GiB
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch
from timing import best
from torch import Tensor, nn

from darknight.coding.fixed_point import (
    exponent_for,
    largest_magnitude,
    moments,
    quantise_nearest,
    requantise,
    unchanged,
)
from darknight.models import build_model
from darknight.runtime import keep_memory

MODELS = ("vgg16", "resnet152")
BITS = 10
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=1e-6, momentum=0.9, weight_decay=5e-4),
    "SGD, fused": partial(torch.optim.SGD, lr=1e-6, momentum=0.9, weight_decay=5e-4, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-6),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-6, fused=True),
}


class Weights:
    """Of one network, with their integers."""

    def __init__(self, model: nn.Module) -> None:
        self.floats = [parameter.detach() for parameter in model.parameters() if parameter.dim() > 1]
        self.exponents = [exponent_for(largest_magnitude(each), BITS) for each in self.floats]
        self.integers = [quantise_nearest(*each) for each in zip(self.floats, self.exponents, strict=True)]
        self.other = [torch.empty_like(each) for each in self.floats]

    def copied(self) -> None:
        for to, each in zip(self.other, self.floats, strict=True):
            to.copy_(each)

    def apart(self) -> None:
        for place, (each, exponent) in enumerate(zip(self.floats, self.exponents, strict=True)):
            before = self.integers[place]
            assert exponent_for(largest_magnitude(each), BITS) == exponent
            after = quantise_nearest(each, exponent)
            before.aminmax()
            before.to(torch.int16)
            moments(_rows(after), 0)
            self.integers[place] = after

    def at_once(self) -> None:
        for place, (each, exponent) in enumerate(zip(self.floats, self.exponents, strict=True)):
            made = requantise(each, exponent, BITS, counted=True, earlier=self.integers[place])
            assert made is not None
            self.integers[place] = made.integers

    def compared(self) -> None:
        for each, exponent, integers in zip(self.floats, self.exponents, self.integers, strict=True):
            unchanged(each, exponent, integers)


def _rows(integers: Tensor) -> Tensor:
    return integers.reshape(*integers.shape[:2], -1)


def main() -> int:
    torch.set_num_threads(1)
    keep_memory()
    for name in MODELS:
        model = build_model(name, shape=(3, 224, 224), classes=1000, seed=0)
        weights = Weights(model)
        runs = {"passes apart": weights.apart, "one pass": weights.at_once, "compared": weights.compared}
        times = best(weights.copied, *runs.values(), clock=time.process_time)
        found = dict(zip(("copy", *runs), times, strict=True))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for kind, make in OPTIMIZERS.items():
            optimizer = make(model.parameters())
            optimizer.step()
            (found[kind],) = best(optimizer.step, times=5, clock=time.process_time)
        print(f"{name}: {sum(each.numel() for each in weights.floats):,} weights, a copy takes {found['copy']:.3f} s")
        for kind, seconds in found.items():
            print(f"    {kind:14} {seconds / found['copy']:6.2f}")
        before, now = (found["SGD, fused"] + found[kind] for kind in ("passes apart", "one pass"))
        print(f"    optimizer (SGD, fused) and weights: {now / before:.2f} of what they took apart")
    return 0


if __name__ == "__main__":
    sys.exit(main())
