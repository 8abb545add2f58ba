"""The processes of a Ray that this worker started: found by its folder, and ended when Ray does not do it.

Ray's agents overwrite their command line and their environment, and when their parent dies they become orphans. What
they cannot hide is what they have open: their logs are in the folder.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PERSEVERE = 5.0  # seconds of looking again: a process that was killed may have started another just before
_log = logging.getLogger("darknight.worker")


@contextmanager
def no_longer_than(seconds: float, folder: str | None) -> Iterator[None]:
    """On a busy machine Ray can take minutes to end itself. If it is ours, its processes are killed then."""
    if folder is None:
        yield
        return

    def end() -> None:
        _log.warning("Ray does not end; its processes are killed", extra={"fields": {"seconds": seconds}})
        end_processes_of(folder)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_processes_of(folder: str) -> None:
    """Kills what Ray started there, known to Ray or not. The folder is ours alone."""
    deadline = time.monotonic() + _PERSEVERE
    while (found := processes_of(folder)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_of(folder: str) -> set[int]:
    """All that have the folder in their command line or something in it open, with all that they started; never us."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    found: list[int] = []
    inside = f"{os.path.realpath(folder)}/"
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != os.getpid():
            with suppress(OSError):  # it ended meanwhile, or is not ours to look into
                children[_parent(entry)].append(int(entry.name))
                if folder.encode() in (entry / "cmdline").read_bytes() or _has_open(entry, inside):
                    found.append(int(entry.name))
    ours: set[int] = set()
    while found:
        pid = found.pop()
        if pid not in ours:
            ours.add(pid)
            found += children[pid]
    return ours


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])  # a name may contain anything before that


def _has_open(entry: Path, inside: str) -> bool:
    for link in (entry / "fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            if os.readlink(link).startswith(inside):
                return True
    return False
