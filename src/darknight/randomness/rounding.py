"""Random words for stochastic rounding: a public function of where they are used, never drawn from a stream.

A retry, a recomputation or another number of inputs per virtual batch must not shift them, so they are indexed by
(seed, layer, call, kind, element). They need no secrecy, and no cipher: two keys from a hash of the others choose a
bijection of the element (docs/adr/0038). So each of them is uniform, and within a tensor none comes twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from darknight.kernels import Rounding, rounding_words


def rounding_of(*, seed: int, layer: str, call: int, kind: str) -> Rounding:
    """What `kernels.encode` makes words of where it rounds; the element's place in the tensor is its index."""
    index = f'["darknight/rounding/v2", {seed}, {_quoted(layer)}, {call}, {_quoted(kind)}]'  # as json.dumps gives it
    key, other = struct.unpack("<2I", hashlib.sha256(index.encode()).digest()[:8])
    return Rounding(key, other)


_quoted = lru_cache(maxsize=4096)(json.dumps)  # of names, which are the same in every call


def words_of(rounding: Rounding, shape: Sequence[int]) -> Tensor:
    """int32 whose lower 24 bits are uniform, written down. kernels.quantise_stochastic makes a fraction of 2^24 of
    them.
    """
    return rounding_words(math.prod(shape), rounding).view(tuple(shape))
