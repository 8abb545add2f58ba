"""Memory that is used again: tensors that come and go in every step shall not be fetched from the kernel each time.

Filling pages that are fresh from the kernel is about ten times slower than filling memory that was used before. glibc
gives every large tensor back as soon as it is dropped, and so asks for fresh pages in every layer of every step.

Nor shall what stays for good be looked at for garbage again and again: a step makes so many small objects that Python
goes through all of torch's several times in each, which takes a tenth of the enclave's time where layers are small.
"""

from __future__ import annotations

import ctypes
import gc
from functools import cache

# <malloc.h>: beyond how many free bytes at its end a heap shrinks; how many tensors may have a mapping of their own;
# how many heaps there are, each of which is given back when nothing is left in it.
_SETTINGS = {-1: -1, -4: 0, -8: 1}  # M_TRIM_THRESHOLD (never), M_MMAP_MAX, M_ARENA_MAX


@cache
def keep_memory() -> bool:
    """From now on this process keeps memory that it has freed, and uses it again. False where that cannot be set.

    For programs whose steps are alike, as a training's are: the process stays as large as it ever was, and what is
    there now stays.
    """
    gc.collect()
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    return mallopt is not None and all(bool(mallopt(*each)) for each in _SETTINGS.items())
