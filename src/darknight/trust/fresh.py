"""Fresh secrets and nonces, from the operating system. The only file of this room that draws any.

Masks come from darknight.randomness and nowhere else; what is drawn here protects data that is stored or sent (ADR 14).
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32
NONCE_BYTES = 32


def fresh_key() -> bytes:
    """256 bits for a key that is used for one purpose."""
    return secrets.token_bytes(KEY_BYTES)


def fresh_nonce() -> bytes:
    """256 bits that nobody has seen before."""
    return secrets.token_bytes(NONCE_BYTES)


def fresh_order(count: int) -> NDArray[np.int64]:
    """The numbers from 0 to `count` - 1 in an order that nobody can guess: sorted by 64 random bits each."""
    return np.frombuffer(secrets.token_bytes(8 * count), dtype=np.uint64).argsort().astype(np.int64, copy=False)
