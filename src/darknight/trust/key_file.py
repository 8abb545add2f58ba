"""Data keys, and the files that they are kept in.

Guarantees: a key file is created with mode 0600 before anything is in it, never replaces what is there, is on the disk
when `write_key_file` returns, and is refused when other accounts can read it. A DataKey shows itself in no repr and no
pickle. Contract tests: tests/trust/test_key_file.py.
Assumes: a file system that keeps modes. The file itself is not encrypted: who reads it can read the data.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from darknight.errors import DarKnightError, TrustError, other_format
from darknight.trust.durable import sync_folder
from darknight.trust.fresh import KEY_BYTES, fresh_key
from darknight.types import Secret

_FORMAT = 1
_KIND = "darknight key "
_FIRST_LINE = f"{_KIND}{_FORMAT}"
_PATTERN = re.compile(rf"{_FIRST_LINE}\nkey ([0-9a-f]{{64}})\n(?:manifest ([0-9a-f]{{64}})\n)?")
_LIMIT = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, repr=False, eq=False)
class DataKey(Secret):
    """256 bits from which all keys of one sealing are derived. Nothing is encrypted under them directly."""

    raw: bytes

    def __post_init__(self) -> None:
        if type(self.raw) is not bytes or len(self.raw) != KEY_BYTES:
            raise TrustError(f"a data key needs exactly {KEY_BYTES} bytes.", check="key")

    @classmethod
    def fresh(cls) -> DataKey:
        return cls(fresh_key())


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class KeyFile(Secret):
    """What a key file holds. manifest: the SHA-256 of the manifest of the set that the key opens, where it opens one.

    The data holder keeps it beside the key, because whoever stores the sealed set could exchange the manifest there.
    """

    key: DataKey
    manifest: bytes | None = None

    def __post_init__(self) -> None:
        if self.manifest is not None and len(self.manifest) != 32:
            raise TrustError("a key file names a manifest by its SHA-256, 32 bytes.", check="key")


def write_key_file(path: Path, content: KeyFile) -> None:
    """A new file, for this account alone. What is there already is left as it is, and an error."""
    text = f"{_FIRST_LINE}\nkey {content.key.raw.hex()}\n"
    if content.manifest is not None:
        text += f"manifest {content.manifest.hex()}\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), 0o600)  # whatever the umask is
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            sync_folder(path.parent)
        except BaseException:
            path.unlink(missing_ok=True)  # it is ours: O_EXCL made it
            raise
    except FileExistsError as error:
        raise DarKnightError(
            f"{path} is there already, and a key file is never overwritten: it may be the only way to open something. "
            "Choose another name, or move it away."
        ) from error
    except OSError as error:
        raise DarKnightError(f"cannot write {path}: {error.strerror}. Choose another place for the key.") from error


def read_key_file(path: Path) -> KeyFile:
    """What `write_key_file` wrote. TrustError for a file that others can read, or of another kind."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe does not hold it up
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise TrustError(f"{path}: is not a regular file. Needs the key file.", check="key")
            if found.st_mode & _OTHERS:
                raise TrustError(
                    f"{path}: other accounts may open it (mode {stat.S_IMODE(found.st_mode):04o}); needs 0600. If "
                    f"nobody did, run: chmod 600 {path}",
                    check="key",
                )
            raw = os.read(descriptor, _LIMIT)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise TrustError(f"{path}: cannot be read ({error.strerror}). Needs the key file.", check="key") from error
    text = raw.decode("latin-1")
    version = re.match(rf"{_KIND}([0-9]{{1,9}})\n", text)
    if version is not None and int(version[1]) != _FORMAT:
        raise TrustError(f"{path}: a key of {other_format(int(version[1]), reads=_FORMAT)}.", check="version")
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise TrustError(f"{path}: is no key file, or is damaged. Needs the key file.", check="key")
    key, manifest = match.groups()
    return KeyFile(key=DataKey(bytes.fromhex(key)), manifest=None if manifest is None else bytes.fromhex(manifest))
