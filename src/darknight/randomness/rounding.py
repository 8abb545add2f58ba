"""Uniforms for stochastic rounding: a public function of where they are used, never drawn from a stream.

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


def rounding_uniforms(shape: Sequence[int], *, seed: int, layer: str, call: int, kind: str) -> Tensor:
    """float32 uniforms in [0, 1), multiples of 2^-24; the element's place in the tensor is its index."""
    index = json.dumps(["darknight/rounding/v1", seed, layer, call, kind]).encode()
    stream = Stream(hashlib.sha256(index).digest(), 0)
    words = stream.words(math.prod(shape), torch.int32).bitwise_and_((1 << 24) - 1)
    return words.to(torch.float32).mul_(2.0**-24).view(tuple(shape))
