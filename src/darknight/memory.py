"""Memory that is used again, and in large pages.

Filling pages that are fresh from the kernel is about ten times slower than filling memory that was used before, and
glibc gives every large tensor back as soon as it is dropped. And where a page is 4 KiB, a pass over a large tensor
waits for page tables about as long as for memory: on a virtual machine a copy takes twice as long as in pages of 2 MiB.
Linux gives those to whoever asks (``madvise``), unless its administrator has switched them off.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

# <malloc.h>: beyond how many free bytes at its end a heap shrinks; how many tensors may have a mapping of their own;
# how many heaps there are, each of which is given back when nothing is left in it.
_SETTINGS = {-1: -1, -4: 0, -8: 1}  # M_TRIM_THRESHOLD (never), M_MMAP_MAX, M_ARENA_MAX

_LARGE = 2 << 20  # bytes of a large page
_MADV_HUGEPAGE = 14
_STRICT = "2"  # vm.overcommit_memory: addresses count as memory, whether or not they are used


def keep(most: int) -> bool:
    """From now on this process keeps memory that it has freed, and uses it again. False where that cannot be set.

    The first `most` bytes of it, about, are in large pages where the system has them. Addresses for these are set aside
    at once, memory is taken when it is written to.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)  # glibc's
    if mallopt is None or not all(mallopt(*each) for each in _SETTINGS.items()):
        return False
    if not _strict():
        _reserve(libc, most)
    return True


def ask_for_large_pages(address: int, nbytes: int) -> None:
    """For the pages that lie inside this range and were not touched yet. It is about speed: nothing fails for it."""
    begin, end = -(-address // _LARGE) * _LARGE, (address + nbytes) // _LARGE * _LARGE
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)


def free_bytes() -> int:
    """What the kernel could give to new programs without ending others. Raises LookupError where it does not say."""
    return _meminfo("MemAvailable")


def is_short() -> bool:
    """Whether less than a quarter of this machine's memory is free: then nobody should keep what he does not need."""
    try:
        return free_bytes() < _meminfo("MemTotal") // 4
    except LookupError:
        return False


def _meminfo(name: str) -> int:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"no {name} in /proc/meminfo")


def large_page_settings() -> dict[str, str]:
    """Who gets large pages on this machine: ``own`` memory, and memory that is ``shared`` between processes."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    return {"own": _chosen(folder / "enabled"), "shared": _chosen(folder / "shmem_enabled")}


def _reserve(libc: ctypes.CDLL, most: int) -> None:
    """The heap grows by `most` bytes once, and never shrinks. What malloc gives out next lies there."""
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(most))
    if block is not None:
        ask_for_large_pages(block, most)
        libc.free(ctypes.c_void_p(block))


def _strict() -> bool:
    """Whether addresses that nobody uses would be missing elsewhere."""
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    return addresses != resource.RLIM_INFINITY or _text(Path("/proc/sys/vm/overcommit_memory")) == _STRICT


def _chosen(path: Path) -> str:
    """The word in brackets."""
    return _text(path).partition("[")[2].partition("]")[0] or "never"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
