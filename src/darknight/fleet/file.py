"""The fleet file: where the workers are, who runs them, and which certificate each one must show.

::

    [enclave]                               # optional
    identity = "enclave"                    # folder of key.pem and certificate.pem; this is the default

    [[worker]]                              # in the order of the scheme's workers; more than it needs are standbys
    address = "gpu1.example.org:7001"
    operator = "north"                      # who runs it: an operator pools what its workers see
    certificate = "north.pem"               # or the PEM text itself; it is the only root of this link
    shared_memory = "@darknight-north"      # optional, for a worker on this machine
    name = "north"                          # optional; the address otherwise

Paths are relative to the file. `python -m darknight.worker` prints a ready-made entry when it starts.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darknight.errors import UsageError
from darknight.wire.identity import checked_certificate, fingerprint, read_certificate

_TABLES = ("enclave", "worker")
_ENCLAVE_KEYS = ("identity",)
_NEEDED = ("address", "operator", "certificate")
_OPTIONAL = ("shared_memory", "name")
# A host name, an IPv4 address or an IPv6 address in brackets, and a port. Nothing else: gRPC would also take a scheme.
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})")
_LONGEST_WORD = 100
_LONGEST_SOCKET = 107  # bytes, of the kernel


@dataclass(frozen=True, kw_only=True)
class WorkerEntry:
    """One [[worker]] of a fleet file. certificate: PEM."""

    name: str
    address: str
    operator: str
    certificate: bytes
    shared_memory: str | None = None

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.certificate)


@dataclass(frozen=True, kw_only=True)
class FleetFile:
    """A fleet file without mistakes. identity: the folder of the enclave's key and certificate."""

    path: Path
    identity: Path
    workers: tuple[WorkerEntry, ...]


def read_fleet_file(path: str | Path) -> FleetFile:
    """What the file says. Every mistake raises UsageError, which names the file, the entry and the remedy."""
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give the path of a fleet file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file ({error}). Correct it.") from error
    _refuse_unknown(str(path), tables, _TABLES)
    entries = tables.get("worker")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path}: it names no workers. Add a table [[worker]], with double brackets, for each one.")
    workers = tuple(_worker(path, number, entry) for number, entry in enumerate(entries, 1))
    _refuse_twice(path, workers)
    return FleetFile(path=path, identity=_identity(path, tables.get("enclave", {})), workers=workers)


def _identity(path: Path, table: object) -> Path:
    where = f"{path}, [enclave]"
    if not isinstance(table, dict):
        raise UsageError(f"{path}: enclave is a {type(table).__name__}; needs a table, [enclave].")
    _refuse_unknown(where, table, _ENCLAVE_KEYS)
    return path.parent / (_word(where, table, "identity", longest=4096) if "identity" in table else "enclave")


def _worker(path: Path, number: int, entry: dict[str, Any]) -> WorkerEntry:
    where = f"{path}, worker {number}"
    _refuse_unknown(where, entry, (*_NEEDED, *_OPTIONAL))
    missing = [key for key in _NEEDED if key not in entry]
    if missing:
        raise UsageError(f"{where}: no {', no '.join(missing)}. Add what the worker printed when it started.")
    address = _address(where, _word(where, entry, "address", longest=300))
    return WorkerEntry(
        name=_word(where, entry, "name") if "name" in entry else address,
        address=address,
        operator=_word(where, entry, "operator"),
        certificate=_certificate(path, where, _word(where, entry, "certificate", longest=1 << 16, lines=True)),
        shared_memory=_door(path, where, entry) if "shared_memory" in entry else None,
    )


def _address(where: str, text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise UsageError(
            f"{where}: {text!r} is no address. Write host:port, such as gpu1.example.org:7001 or [2001:db8::1]:7001."
        )
    return f"{found['host'].lower()}:{int(found['port'])}"


def _certificate(path: Path, where: str, text: str) -> bytes:
    try:
        if "-----BEGIN" in text:
            return checked_certificate(text.encode(), "the text under certificate")
        return read_certificate(path.parent / text)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _door(path: Path, where: str, entry: Mapping[str, Any]) -> str:
    name = _word(where, entry, "shared_memory", longest=4096)
    if not name.startswith("@"):
        name = str(path.parent.absolute() / name)
    if len(os.fsencode(name)) > _LONGEST_SOCKET:
        raise UsageError(
            f"{where}: shared_memory has {len(os.fsencode(name))} bytes; a Unix socket takes {_LONGEST_SOCKET}. "
            "Use a shorter path, or @name at both ends."
        )
    return name


def _word(where: str, table: Mapping[str, Any], key: str, *, longest: int = _LONGEST_WORD, lines: bool = False) -> str:
    value = table[key]
    if not isinstance(value, str):
        raise UsageError(f'{where}: {key} is {type(value).__name__}; needs a text, {key} = "...".')
    if not value.strip() or len(value) > longest:
        raise UsageError(f"{where}: {key} has {len(value)} signs; needs 1 to {longest}, not only blanks.")
    if not lines and not value.isprintable():
        raise UsageError(f"{where}: {key} has signs that cannot be printed. Write it in one line of plain text.")
    return value


def _refuse_unknown(where: str, found: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(found.keys() - set(known))
    if unknown:
        raise UsageError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}. Correct it.")


def _refuse_twice(path: Path, workers: tuple[WorkerEntry, ...]) -> None:
    """Links are under keys of their own: two entries with one certificate would be one worker with two shares."""
    for what, attribute, remedy in (
        ("address", "address", "Give each worker an entry, and each entry a worker."),
        (
            "certificate",
            "fingerprint",
            "Each worker has a key of its own (--state DIR): copy the certificate of each.",
        ),
        ("shared_memory", "shared_memory", "Start each worker with a --shared-memory of its own."),
        ("name", "name", "Choose another name, or leave it out."),
    ):
        seen: dict[str, int] = {}
        for number, worker in enumerate(workers, 1):
            value: str | None = getattr(worker, attribute)
            if value is not None and seen.setdefault(value, number) != number:
                raise UsageError(f"{path}, worker {number}: the same {what} as worker {seen[value]}. {remedy}")
