"""Several named pieces of bytes as one, to be sealed together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from darknight.errors import DataError

_PADDING = 1 << 14  # bytes: how long some numbers are when they are written out is nobody's business


def packed(files: Mapping[str, bytes]) -> bytes:
    """Length of the words (8 bytes), the words (JSON: name -> length), the pieces, zeros up to a multiple of 16 KiB."""
    words = json.dumps({name: len(content) for name, content in files.items()}).encode()
    whole = b"".join((len(words).to_bytes(8, "big"), words, *files.values()))
    return whole + bytes(-len(whole) % _PADDING)


def unpacked(data: bytes, place: Path) -> dict[str, bytes]:
    """What `packed` was given. It was sealed, so only another version of DarKnight could have written anything else."""
    try:
        at = 8 + int.from_bytes(data[:8], "big")
        files = {}
        for name, length in json.loads(data[8:at]).items():
            files[name] = data[at : at + length]
            at += length
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{place}: of another version of DarKnight. Use the one that wrote it.") from error
    if len(data) != at + -at % _PADDING or any(data[at:]):
        raise DataError(f"{place}: of another version of DarKnight. Use the one that wrote it.")
    return files
