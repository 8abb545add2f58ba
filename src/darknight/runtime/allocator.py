"""Memory that is used again: tensors that come and go in every step shall not be fetched from the kernel each time.

Filling pages that are fresh from the kernel is about ten times slower than filling memory that was used before. glibc
gives every large tensor back as soon as it is dropped, and so asks for fresh pages in every layer of every step.
"""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of <malloc.h>
_NEVER = 2**31 - 1


@cache
def keep_memory() -> bool:
    """From now on this process keeps memory that it has freed, and uses it again. False where that cannot be set.

    For programs whose steps are alike, as a training's are: the process stays as large as it ever was.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
