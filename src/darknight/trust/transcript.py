"""Digests of several things at once, so that nobody can move a byte from one to the next."""

from __future__ import annotations

import hashlib
import struct

DIGEST_BYTES = 64


def transcript(label: str, *parts: bytes) -> bytes:
    """SHA-512 over the label and each part behind its length: other parts, or another label, give another digest.

    >>> transcript("a", b"bc", b"d") != transcript("a", b"b", b"cd")
    True
    """
    digest = hashlib.sha512()
    for part in (label.encode(), *parts):
        digest.update(struct.pack(">Q", len(part)))
        digest.update(part)
    return digest.digest()
