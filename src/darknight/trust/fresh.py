"""Fresh secrets and nonces, from the operating system. The only file of this room that draws any.

Masks come from darknight.randomness and nowhere else; what is drawn here protects data that is stored or sent (ADR 14).
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32
NONCE_BYTES = 32
_PILES = 256
_AT_ONCE = 1 << 16


def fresh_key() -> bytes:
    """256 bits for a key that is used for one purpose."""
    return secrets.token_bytes(KEY_BYTES)


def fresh_nonce() -> bytes:
    """256 bits that nobody has seen before."""
    return secrets.token_bytes(NONCE_BYTES)


def fresh_order(count: int) -> NDArray[np.unsignedinteger[Any]]:
    """The numbers from 0 to `count` - 1 in an order that nobody can guess, in the smallest type that holds them.

    Few are sorted by 64 random bits each. Of many each goes to one of 256 piles, by a random byte, and these are sorted
    like that and put one on the other, which makes every order as likely (Rao, 1961): to sort all of them at once would
    take several times the memory of the result.
    """
    order = np.arange(count, dtype=np.min_scalar_type(count))
    if count <= _AT_ONCE:
        return _shuffled(order)
    piles, begin = np.frombuffer(secrets.token_bytes(count), dtype=np.uint8), 0
    for number in range(_PILES):
        pile = np.flatnonzero(piles == number).astype(order.dtype)
        order[begin : begin + len(pile)] = _shuffled(pile)
        begin += len(pile)
    return order


def _shuffled(numbers: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.unsignedinteger[Any]]:
    return numbers[np.frombuffer(secrets.token_bytes(8 * len(numbers)), dtype=np.uint64).argsort()]
