"""How fast one core of this machine moves bytes: the least that a pass over memory can take.

Tensors that are far larger than the cache, in memory that was used before, one thread, seconds of the processor, the
best of several. What fits into the cache moves faster, so a network of small layers can do better than these say.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from darknight.errors import UsageError
from darknight.runtime.threads import one_thread

_RECORD = 1 << 20  # bytes that are encrypted at once: more than TLS does, so that Python does not show
_TAG = 16


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Bytes a second of one core. copy, in_place: those read and those written together. seal: AES-256-GCM, one way."""

    copy: float
    in_place: float
    read: float
    seal: float

    def seconds(self, read: int, written: int) -> float:
        """The least: as far as bytes are read and written together, at the faster of the two ways; the rest is read.

        A copy fetches what it overwrites, a change in place does not, and neither does a pass that writes past the
        cache; so the speed of a copy alone would be no limit.
        """
        both = min(read, written)
        return (both + written) / max(self.copy, self.in_place) + (read - both) / self.read


def measure_bandwidth(nbytes: int = 64 << 20, *, times: int = 5) -> Bandwidth:
    """Copies, reads and encrypts so many bytes."""
    if nbytes < _RECORD or times < 1:
        raise UsageError(f"{nbytes} bytes, {times} times; needs at least {_RECORD} and 1.")
    source, target = (torch.ones(nbytes // 4) for _ in range(2))
    sealed = min(nbytes, 8 << 20)
    runs: list[Callable[[], object]] = [
        lambda: target.copy_(source),
        target.neg_,
        lambda: torch.dot(source, source),
        _sealing(sealed),
    ]
    with one_thread():
        copy, in_place, read, seal = (_shortest(run, times) for run in runs)
    size = source.nbytes
    return Bandwidth(copy=2 * size / copy, in_place=2 * size / in_place, read=size / read, seal=sealed / seal)


def _sealing(nbytes: int) -> Callable[[], object]:
    """Record by record, each with a nonce and a tag of its own. The key protects nothing."""
    key, record, out = os.urandom(32), bytes(_RECORD), bytearray(_RECORD + _TAG)

    def run() -> None:
        for number in range(nbytes // _RECORD):
            encryptor = Cipher(AES(key), GCM(number.to_bytes(12, "big"))).encryptor()
            encryptor.update_into(record, out)
            encryptor.finalize()

    return run


def _shortest(run: Callable[[], object], times: int) -> float:
    shortest = float("inf")
    for _ in range(times + 1):  # once more, to warm up
        begun = time.thread_time()
        run()
        shortest = min(shortest, time.thread_time() - begun)
    return shortest
