"""The library built from keystream.c, if this installation has it and this processor has instructions for AES."""

from __future__ import annotations

import ctypes
from functools import cache

from darknight.kernels import compiled
from darknight.kernels.compiled import Function

BLOCK = 16  # bytes of AES
KEY_BYTES = 32
_NUMBER, _Key = ctypes.c_int64, ctypes.c_uint8 * KEY_BYTES
_SIGNATURE = (
    ctypes.c_void_p,  # the key
    ctypes.c_uint64,  # the number of the stream
    ctypes.c_uint64,  # its first block
    _NUMBER,  # bytes of that which were read before
    ctypes.c_void_p,  # where to write
    _NUMBER,  # how many bytes
)


@cache
def chosen(kind: str = "") -> Function | None:
    """None where somebody else has to do it. kind: "aes_" for the instructions of one block at a time."""
    if not compiled.wanted():
        return None
    function = compiled.loaded("keystream", f"darknight_keystream_{kind}1", _SIGNATURE, _NUMBER)
    return function if function is not None and function(_Key(), 0, 0, 0, None, 0) == 0 else None


def fill(function: Function, key: bytes, number: int, first: int, out: int, size: int) -> int:
    """Writes `size` bytes of the stream `number` under `key`, from its byte `first` on, to the address `out`.

    Returns how many were written.
    """
    if len(key) != KEY_BYTES or not 0 <= number < 1 << 64 or not 0 <= first <= first + size <= BLOCK << 64:
        raise ValueError(f"{size} bytes from {first} on of stream {number}, under a key of {len(key)} bytes.")
    block, skip = divmod(first, BLOCK)
    held = _Key.from_buffer_copy(key)
    try:
        written: int = function(ctypes.addressof(held), number, block, skip, out, size)
    finally:
        ctypes.memset(held, 0, KEY_BYTES)
    return written
