"""How fast is the generator? Uniform field elements and grid Gaussians, one core. Targets: 500 MB/s and 50 M/s.

Fresh memory is shown apart: the kernel's page faults can cost more than the generator.

python benchmarks/randomness.py
"""

from __future__ import annotations

import torch
from timing import best

from darknight.coding import PRIME_25, PRIME_28
from darknight.randomness import Randomness, grid_gaussian, uniform_below

COUNT = 1 << 23


def main() -> None:
    torch.set_num_threads(1)
    generator = Randomness.from_operating_system()
    words, values = torch.zeros(COUNT, dtype=torch.int32), torch.zeros(COUNT, dtype=torch.int64)
    for memory, reuse in (("memory reused", True), ("fresh memory", False)):
        print(memory)
        out = {"out": words if reuse else None}
        (took,) = best(lambda out=out: generator.fresh().words(COUNT, torch.int32, **out))
        print(f"  keystream               {4 * COUNT / took / 1e6:8.0f} MB/s")
        for prime in (PRIME_25, PRIME_28):
            (took,) = best(lambda prime=prime, out=out: uniform_below(generator.fresh(), (COUNT,), prime, **out))
            print(f"  uniform below 2^{prime.bit_length()}     {4 * COUNT / took / 1e6:8.0f} MB/s   (target 500)")
        out = {"out": values if reuse else None}
        (took,) = best(lambda out=out: grid_gaussian(generator.fresh(), (COUNT,), 2.0**54, **out))
        print(f"  grid Gaussians          {COUNT / took / 1e6:8.1f} M/s    (target 50)")


if __name__ == "__main__":
    main()
