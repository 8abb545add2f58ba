"""The folder that results go to. A file is there complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from darknight.errors import DarKnightError


class OutputFolder:
    """A folder that is known to be writable before any work is done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = self._temporary("probe")
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _unwritable(path, error) from error

    def write(self, name: str, content: bytes) -> Path:
        """Write a file under another name first, so that a crash or a full disk leaves no half of it."""
        target, temporary = self.path / name, self._temporary(name)
        try:
            try:
                with temporary.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise _unwritable(target, error) from error
        return target

    def _temporary(self, name: str) -> Path:
        return self.path / f".{name}.{os.getpid()}.tmp"


def _unwritable(path: Path, error: OSError) -> DarKnightError:
    return DarKnightError(f"cannot write {path}: {error.strerror}. Choose another --output, or make room there.")
