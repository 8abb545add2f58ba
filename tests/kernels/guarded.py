"""Memory that ends where an operand ends: what a script begins with that is to die if a library goes further."""

PRELUDE = """
import ctypes, mmap, sys

libc = ctypes.CDLL(None)
PAGE = mmap.PAGESIZE
kept = []


def at_the_end(nbytes):  # memory whose next byte cannot be touched
    pages = -(-max(1, nbytes) // PAGE)
    area = mmap.mmap(-1, (pages + 1) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert libc.mprotect(ctypes.c_void_p(start + pages * PAGE), ctypes.c_size_t(PAGE), 0) == 0
    kept.append(area)
    return start + pages * PAGE - nbytes
"""
