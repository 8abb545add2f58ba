"""What encoding and decoding cost, over a plain copy of as many bytes: the least that they could cost.

The default scheme (K=4, M=1, masked gradients), one thread, tensors that are far larger than the cache. An encode reads
x and the noise, and writes the quantised x and a share for each worker; a decode reads the answers, and writes integers
and floats. All take turns, in seconds of the processor, and the best of several counts. Examples are as large as those
of layers, 4 MiB of 64: of rows that stand further apart a processor fetches by itself what is read next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from darknight.coding import Scheme, draw_code, field
from darknight.coding.arithmetic import PRIME_28
from darknight.kernels import encode
from darknight.randomness import Randomness, uniform_below
from darknight.runtime.threads import one_thread

_INPUTS = 4
_GROUPS = 4
_LARGEST = 1 << 10
_EXPONENT = 8


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds over those of a copy, the best of `times`; noise: drawing it, over the encode that needs it."""

    nbytes: int
    times: int
    encode_over_copy: float
    decode_over_copy: float
    noise_over_encode: float


def measure_passes(nbytes: int = 64 << 20, *, times: int = 5) -> Passes:
    """Encodes and decodes x of so many bytes."""
    randomness = Randomness.from_operating_system()
    code = draw_code(Scheme(inputs=_INPUTS, colluders=1), randomness.fresh())
    features = max(1, nbytes // (_GROUPS * _INPUTS * 4))  # of each example
    x = torch.linspace(-3, 3, _GROUPS * _INPUTS * features).view(_GROUPS * _INPUTS, features)
    noise = uniform_below(randomness.fresh(), (1, _GROUPS, features), PRIME_28)
    outs = [torch.zeros(_GROUPS, features, dtype=torch.int32) for _ in code.A.data]
    rows = [[int(value) for value in row] for row in code.A.rows]
    answers = {seat: outs[seat] for seat in code.A.base}
    written = x.nbytes + sum(out.nbytes for out in outs)
    read = x.nbytes + noise.nbytes
    answered = sum(answer.nbytes for answer in answers.values())
    runs: list[Callable[[], object]] = [
        lambda: encode(x, _EXPONENT, None, rows, noise, PRIME_28, inputs=_INPUTS, largest=_LARGEST, outs=outs),
        _copy((read + written) // 2),
        lambda: field.decode_values(code.A, answers, PRIME_28, _EXPONENT, len(x)),
        _copy((answered + 2 * x.nbytes) // 2),
        lambda: uniform_below(randomness.fresh(), (1, _GROUPS, features), PRIME_28, out=noise.view(-1)),
    ]
    shortest = [float("inf")] * len(runs)
    with one_thread():
        for _ in range(times + 1):  # once more, to warm up
            for place, run in enumerate(runs):
                begun = time.thread_time()
                run()
                shortest[place] = min(shortest[place], time.thread_time() - begun)
    encoding, written_copy, decoding, answered_copy, drawing = shortest
    return Passes(
        nbytes=nbytes,
        times=times,
        encode_over_copy=encoding / written_copy,
        decode_over_copy=decoding / answered_copy,
        noise_over_encode=drawing / encoding,
    )


def _copy(nbytes: int) -> Callable[[], object]:
    """A copy between memories that were used before."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    return lambda: target.copy_(source)
