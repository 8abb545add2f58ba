"""Random words for stochastic rounding: a public function of where they are used, never drawn from a stream.

A retry, a recomputation or another number of inputs per virtual batch must not shift them, so they are indexed by
(seed, layer, call, kind, element). They need no secrecy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from darknight.randomness.keystream import Stream


def rounding_words(shape: Sequence[int], *, seed: int, layer: str, call: int, kind: str) -> Tensor:
    """int32 whose lower 24 bits are uniform; the element's place in the tensor is its index.

    kernels.quantise_stochastic makes a fraction of 2^24 of them.
    """
    index = json.dumps(["darknight/rounding/v1", seed, layer, call, kind]).encode()
    stream = Stream(hashlib.sha256(index).digest(), 0)
    return stream.words(math.prod(shape), torch.int32).view(tuple(shape))
