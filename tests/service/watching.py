"""Every file that ever lay in a folder, however short: kept under a second name while a process works there."""

import ctypes
import os
import struct
import threading
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

_CREATE, _MOVED_TO, _DIRECTORY, _OVERFLOW = 0x100, 0x80, 0x40000000, 0x4000
_HEAD = struct.calcsize("iIII")
_END = ".watched-to-the-end"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Kept:
    """One file. path: where it is kept. names: all that it had, relative to the folder."""

    path: Path
    names: set[str] = field(default_factory=set)


class Watch:
    """While entered, gives each file that appears below `folder` a second name in `attic`, on the same file system.

    So it is there when it was moved, replaced or removed, with what was last written to it. Only what is made and
    removed in a new folder, before that is watched too, is neither kept nor counted.
    """

    def __init__(self, folder: Path, attic: Path) -> None:
        self._folder, self._attic = folder, attic
        self._names = count()
        self._kept: dict[int, Kept] = {}
        self._early: set[Path] = set()  # met in a new folder; whether an event of it follows is not known
        self._created, self._without_event = 0, 0
        self._folders: dict[int, Path] = {}

    def __enter__(self) -> "Watch":
        self._attic.mkdir()
        self._queue = _libc.inotify_init1(os.O_CLOEXEC)
        self._enter(self._folder)
        self._early.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / _END).mkdir()  # events come in order: behind this one there is none
        self._thread.join()
        (self._folder / _END).rmdir()
        os.close(self._queue)

    @property
    def files(self) -> list[Kept]:
        return list(self._kept.values())

    @property
    def missed(self) -> int:
        """How many files were made and gone before they could be kept."""
        return self._created - (len(self._kept) - self._without_event)

    def _run(self) -> None:
        while True:
            events, place = os.read(self._queue, 1 << 16), 0
            while place < len(events):
                number, mask, _, length = struct.unpack_from("iIII", events, place)
                name = events[place + _HEAD : place + _HEAD + length].rstrip(b"\0").decode()
                place += _HEAD + length
                if mask & _OVERFLOW:
                    self._created += 1  # at least one: `missed` tells
                elif name == _END:
                    return
                elif mask & _DIRECTORY:
                    self._enter(self._folders[number] / name)
                else:
                    self._seen(self._folders[number] / name, created=bool(mask & _CREATE))

    def _seen(self, path: Path, *, created: bool) -> None:
        if created:
            self._created += 1
            if path in self._early:
                self._early.remove(path)
                self._without_event -= 1
        self._keep(path)

    def _enter(self, folder: Path) -> None:
        """Watch a new folder. Files may be there already, with or without an event to follow."""
        number = _libc.inotify_add_watch(self._queue, os.fsencode(folder), _CREATE | _MOVED_TO)
        if number < 0:
            return  # it is gone again
        self._folders[number] = folder
        for path in folder.iterdir():
            if path.is_dir():
                self._enter(path)
            elif self._keep(path):
                self._early.add(path)
                self._without_event += 1

    def _keep(self, path: Path) -> bool:
        """Whether it is there, and is a new one."""
        other = self._attic / str(next(self._names))
        try:
            os.link(path, other, follow_symlinks=False)
        except FileNotFoundError:  # moved on: the event of its next name follows
            return False
        number = other.stat().st_ino
        known = number in self._kept
        if known:
            other.unlink()
        self._kept.setdefault(number, Kept(other)).names.add(str(path.relative_to(self._folder)))
        return not known
