"""Files that appear whole or not at all, and are on the disk when the call returns."""

from __future__ import annotations

import os
from pathlib import Path

UNFINISHED = ".unfinished-"


def write_durably(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Under another name first. An OSError is for the caller; what was there before it is still there then."""
    temporary = path.with_name(f"{UNFINISHED}{path.name}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the umask is
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove what a killed process left unfinished."""
    for path in folder.glob(f"{UNFINISHED}*"):
        path.unlink()
