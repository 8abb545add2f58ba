"""Encode, decode and both sides of a check by the shape of a layer, beside a copy of as many bytes.

Nanoseconds of one core for each number of the batch, best of several, each after memory that is larger than the cache
was read; and what that is of a copy. The default scheme; shares, noise and answers lie in memory that was used before.
A check reads its operand and what decoding has left of the result.

    OMP_NUM_THREADS=1 python benchmarks/shapes.py [--batch 8] [--times 9]
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from timing import best

from darknight.coding import Scheme, draw_code, field
from darknight.coding.arithmetic import PRIME_28
from darknight.integrity import Rounded, sides
from darknight.integrity.weighed import Weighed, moduli_for, weighing_for
from darknight.kernels import encode
from darknight.ops import Conv
from darknight.ops.conv import Padding
from darknight.randomness import Randomness, uniform_below
from darknight.runtime import keep_memory

PLANES = [(64, 224), (128, 112), (256, 56), (128, 56), (512, 28), (256, 28), (1024, 14), (512, 14)]  # channels, size
SAME = Conv(stride=(1, 1), padding=Padding(((1, 1), (1, 1)), "zeros"), dilation=(1, 1))
ELSEWHERE = 64 << 20  # bytes
EXPONENT = 8
MOST = 4.0  # magnitude of x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--times", type=int, default=9)
    wish = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    emptied = partial(torch.zeros(ELSEWHERE, dtype=torch.uint8).add_, 1)
    print("ns a number, and of a copy:      encode          decode           check")
    for channels, size in PLANES:
        encoding, decoding, checking = (
            f"{1e9 * seconds / numbers:5.2f}{seconds / copied:6.2f}"
            for seconds, copied, numbers in measured(emptied, wish.batch, channels, size, wish.times)
        )
        print(f"{channels:5} channels, {size:3} x {size:3}     {encoding}     {decoding}     {checking}")


def measured(
    emptied: partial[object], batch: int, channels: int, size: int, times: int
) -> list[tuple[float, float, int]]:
    """Seconds of each pass, those of a copy of as many bytes, and the numbers of the batch."""
    scheme, randomness = Scheme(inputs=4, colluders=1), Randomness.from_operating_system()
    code = draw_code(scheme, randomness.fresh())
    x = torch.randn(batch, channels, size, size).clamp_(-MOST, MOST)  # an encode is told what its numbers are between
    share = (-(-batch // scheme.inputs), *x.shape[1:])
    noise = uniform_below(randomness.fresh(), (scheme.colluders, *share), PRIME_28)
    shares = [
        None if seat in code.A.carriers else torch.zeros(share, dtype=torch.int32) for seat in range(scheme.workers)
    ]
    answers = {seat: uniform_below(randomness.fresh(), share, PRIME_28) for seat in code.A.base}
    floats, weights = torch.zeros_like(x), torch.randint(-99, 99, (channels, channels, 3, 3), dtype=torch.int32)
    vectors, weighing = weighing_for(SAME, tuple(x.shape), PRIME_28, randomness.fresh())
    sums = torch.zeros(2, len(vectors.u.entries), size, size, dtype=torch.int32)
    result, moduli = Weighed(tuple(x.shape), vectors, sums), moduli_for(PRIME_28, False)

    def encoded() -> object:
        return encode(
            x,
            EXPONENT,
            None,
            code.A.integers,
            noise,
            PRIME_28,
            inputs=scheme.inputs,
            largest=int(MOST * 2**EXPONENT),
            outs=shares,
            keep=False,
            row=0,
        )

    def decoded() -> object:
        return field.decode_weighed(code.A, answers, PRIME_28, EXPONENT, batch, weighing, into=floats)

    def checked() -> object:
        return sides.forward(SAME, result, Rounded(x, EXPONENT), weights, moduli)

    written = sum(each.nbytes for each in shares if each is not None)
    read = sum(each.nbytes for each in answers.values())
    runs = {
        encoded: x.nbytes + noise.nbytes + written,
        decoded: read + floats.nbytes,
        checked: x.nbytes + weights.nbytes,
    }
    found = []
    for run, nbytes in runs.items():
        if run() is None:
            raise SystemExit("this installation has no compiled kernels: install it where there is a C compiler")
        source, target = torch.ones(nbytes // 2, dtype=torch.uint8), torch.ones(nbytes // 2, dtype=torch.uint8)
        turns = best(emptied, run, emptied, partial(target.copy_, source), times=times, clock=time.thread_time)
        found.append((turns[1], turns[3], x.numel()))
    return found


if __name__ == "__main__":
    main()
