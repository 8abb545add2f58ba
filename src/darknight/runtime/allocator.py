"""Memory of a program whose steps are alike, as a training's are: it is kept, and Python does not look through it.

A step makes so many small objects that Python goes through all of torch's in search of garbage several times in each,
which takes a tenth of the enclave's time where layers are small.
"""

from __future__ import annotations

import gc
import os
from functools import cache

from darknight.memory import keep


@cache
def keep_memory() -> bool:
    """From now on this process keeps memory that it has freed, and uses it again. False where that cannot be set.

    The process stays as large as it ever was, and what is there now stays. Up to half of what the machine has is in
    large pages, where the system gives these out.
    """
    gc.collect()
    gc.freeze()
    return keep(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
