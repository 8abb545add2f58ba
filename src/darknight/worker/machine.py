"""The memory of this machine: how much there is, and a wall around this process."""

from __future__ import annotations

import ctypes
import os
import resource
import weakref
from collections.abc import Callable
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

# Beyond what the budgets count: stacks of threads, gRPC's buffers, and holes between the blocks that malloc gave out.
_ASIDE = 512 << 20
_HOLES = 4  # a part of the limit


def available_memory() -> int:
    """Bytes that the machine has, or that the control group of this process may use, if that is less."""
    pages = resource.getpagesize()
    total = _number_after(_PROC / "meminfo", "MemTotal:") * 1024
    limits = [int(text) for text in _group_limits() if text.isdecimal()]  # "max" is no limit
    return min([total, *(limit for limit in limits if limit >= pages)])


def _group_limits() -> list[str]:
    """memory.max of this process's control group and of those above it (version 2), and version 1's limit."""
    found = []
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
        group = base / path.lstrip("/")
        # In a container the path may be the host's; the top folder is then the container's own group.
        for folder in {group, *group.parents, base}:
            if folder.is_relative_to(base):
                found.append(_text(folder / name))
    return found


def wall_off(limit: int) -> None:
    """The kernel's backstop: this process gets no more than it has now, `limit`, and a part of it aside.

    The budgets refuse long before, in words. Should they be wrong, an allocation fails here, and not on the machine.
    """
    now = _number_after(_PROC / "self" / "status", "VmData:") * 1024
    most = now + limit + limit // _HOLES + _ASIDE
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def open_more_files() -> None:
    """As many descriptors as the system grants: each connection takes one, also a stranger's until it is cut off."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Ceiling:
    """Keeps what malloc holds back for later from adding up to what is in use.

    Freed memory stays with the process, because memory that is used again is several times faster than fresh memory.
    When it is in the way of the limit it is given back to the system.
    """

    def __init__(self, limit: int) -> None:
        # Opened once: there may be no descriptor left when it is needed. Here and not at the top of the module: what is
        # opened before a fork is about the parent.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._statm)
        self._top = resident(self._statm) + limit
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it

    def make_room(self, nbytes: int) -> None:
        """Called before `nbytes` are allocated."""
        if self._trim is None:
            return
        try:
            near = resident(self._statm) + nbytes > self._top
        except OSError:  # it is about speed and neatness; no task fails for it
            return
        if near:
            self.give_back()

    def give_back(self) -> None:
        """What malloc holds back goes to the system: it is in the way, or nobody will want it again soon."""
        if self._trim is not None:
            self._trim(0)


def resident(statm: int) -> int:
    """Bytes of memory that are this process's own; not what it shares with others. statm: the file of that name."""
    _, pages, shared, *_ = os.pread(statm, 256, 0).split()  # asked before every task; it is the quickest to read
    return (int(pages) - int(shared)) * resource.getpagesize()


def _number_after(path: Path, word: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(word):
            return int(line.split()[1])
    raise RuntimeError(f"{path} has no line {word}: DarKnight's workers need Linux.")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
