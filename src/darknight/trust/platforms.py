"""Where evidence comes from: what a machine offers to the program that runs on it.

    Gramine       SGX: files under /dev/attestation
    ConfigfsTsm   TDX and SEV-SNP: the kernel's report folder, Linux 6.7 or newer

A machine without either has darknight.trust.simulation.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from threading import Lock
from typing import Protocol

from darknight.errors import TrustError, UsageError
from darknight.trust.evidence import MAX_CERTIFICATE_BYTES, MAX_CERTIFICATES, MAX_COLLATERAL_BYTES, Evidence
from darknight.trust.fresh import fresh_nonce
from darknight.trust.quote import MAX_QUOTE_BYTES, REPORT_DATA_BYTES, SNP, TDX

GRAMINE = Path("/dev/attestation")
CONFIGFS_TSM = Path("/sys/kernel/config/tsm/report")

_ENTRY_BYTES = 24  # of SNP's table of certificates
_TSM_FORMATS = {"tdx_guest": TDX, "sev_guest": SNP}


class Provider(Protocol):
    """Makes evidence about the program that asks."""

    @property
    def name(self) -> str: ...

    @property
    def simulated(self) -> bool: ...

    def evidence(self, report_data: bytes) -> Evidence:
        """Evidence that carries these 64 bytes. Raises TrustError (check "provider") if the machine gives none."""
        ...


class Gramine:
    """SGX under Gramine, with sgx.remote_attestation = "dcap" in the manifest.

    collateral: a file that somebody keeps up to date; it is signed by Intel, so nobody has to be trusted with that.
    """

    name = "gramine"
    simulated = False

    def __init__(self, root: Path = GRAMINE, *, collateral: Path | None = None) -> None:
        self._root = root
        self._collateral = collateral
        self._alone = Lock()  # there is one user_report_data for all threads

    def evidence(self, report_data: bytes) -> Evidence:
        _check_size(report_data)
        with self._alone:
            _write(self._root / "user_report_data", report_data)
            quote = _read(self._root / "quote", MAX_QUOTE_BYTES)
        return _carrying(report_data, Evidence.of(quote, collateral=_optional(self._collateral)), self.name)


class ConfigfsTsm:
    """TDX or SEV-SNP through the kernel's configfs-tsm.

    collateral: as for Gramine, for TDX. certificates: files of SNP's chain, beside those that the host hands out.
    """

    name = "configfs-tsm"
    simulated = False

    def __init__(
        self, root: Path = CONFIGFS_TSM, *, collateral: Path | None = None, certificates: tuple[Path, ...] = ()
    ) -> None:
        self._root = root
        self._collateral = collateral
        self._certificates = certificates

    def evidence(self, report_data: bytes) -> Evidence:
        _check_size(report_data)
        folder = self._root / f"darknight-{fresh_nonce().hex()[:16]}"
        try:
            folder.mkdir()
        except OSError as error:
            raise _unavailable(folder, error) from None
        try:
            return _carrying(report_data, self._ask(folder, report_data), self.name)
        finally:
            try:
                folder.rmdir()
            except OSError as error:
                raise _unavailable(folder, error) from None

    def _ask(self, folder: Path, report_data: bytes) -> Evidence:
        _write(folder / "inblob", report_data)
        quote = _read(folder / "outblob", MAX_QUOTE_BYTES)
        provider = _read(folder / "provider", 64).decode("ascii", "replace").strip()
        generation = _read(folder / "generation", 64).strip()
        if generation != b"1":
            raise _refused(f"{folder.name} was written by somebody else meanwhile (generation is not 1). Ask again.")
        if provider not in _TSM_FORMATS:
            raise _refused(f"the provider {provider!r} is unknown; known are {', '.join(sorted(_TSM_FORMATS))}.")
        certificates: tuple[bytes, ...] = ()
        if _TSM_FORMATS[provider] == SNP:
            own = (_read(path, MAX_CERTIFICATE_BYTES) for path in self._certificates)
            certificates = (*_handed_out(folder / "auxblob"), *own)
        evidence = Evidence.of(quote, collateral=_optional(self._collateral), certificates=certificates)
        if evidence.format != _TSM_FORMATS[provider]:
            raise _refused(f"{provider} gave a quote of the format {evidence.format}.")
        return evidence


def certificate_table(table: bytes) -> tuple[bytes, ...]:
    """SNP's table: entries of a GUID, an offset and a length, ended by zeros, and the contents behind them.

    What each is shows in itself, so the GUIDs are not looked at. Raises TrustError where an entry points nowhere.
    """
    found: list[bytes] = []
    for start in range(0, len(table) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
        entry = table[start : start + _ENTRY_BYTES]
        if not any(entry):
            return tuple(found)
        offset, size = struct.unpack_from("<II", entry, 16)
        if size == 0 or offset + size > len(table) or len(found) == MAX_CERTIFICATES:
            break
        found.append(table[offset : offset + size])
    if table:
        raise _refused("the host's table of certificates is malformed.")
    return ()


def find_provider(
    *,
    gramine: Path = GRAMINE,
    configfs_tsm: Path = CONFIGFS_TSM,
    collateral: Path | None = None,
    certificates: tuple[Path, ...] = (),
) -> Provider:
    """What this machine has. Raises UsageError if it has nothing."""
    if (gramine / "quote").exists():
        return Gramine(gramine, collateral=collateral)
    if configfs_tsm.is_dir():
        return ConfigfsTsm(configfs_tsm, collateral=collateral, certificates=certificates)
    raise UsageError(
        f"no TEE here: neither {gramine} (Gramine on SGX) nor {configfs_tsm} (TDX or SEV-SNP, Linux 6.7 or newer) is "
        "there. Run inside one, or use simulated evidence, which protects nothing."
    )


def _carrying(report_data: bytes, evidence: Evidence, name: str) -> Evidence:
    """A platform that attests something else than it was asked to is broken, and better noticed here."""
    if evidence.facts.report_data != report_data:
        raise _refused(f"{name} made a quote for other report data.")
    return evidence


def _check_size(report_data: bytes) -> None:
    if len(report_data) != REPORT_DATA_BYTES:
        raise UsageError(f"report data of {len(report_data)} bytes; needs {REPORT_DATA_BYTES}.")


def _handed_out(path: Path) -> tuple[bytes, ...]:
    """The certificates that the host hands out with an SNP report; many hosts have none."""
    try:
        return certificate_table(_content(path, MAX_CERTIFICATES * MAX_CERTIFICATE_BYTES))
    except OSError:
        return ()


def _optional(path: Path | None) -> bytes | None:
    return None if path is None else _read(path, MAX_COLLATERAL_BYTES)


def _read(path: Path, limit: int) -> bytes:
    try:
        return _content(path, limit)
    except OSError as error:
        raise _unavailable(path, error) from None


def _content(path: Path, limit: int) -> bytes:
    """Part by part, as the kernel gives it."""
    content = bytearray()
    with path.open("rb", buffering=0) as file:
        while part := file.read(limit + 1 - len(content)):
            content += part
    if len(content) > limit:
        raise _refused(f"{path} has more than {limit:,} bytes.")
    return bytes(content)


def _write(path: Path, content: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY)  # configfs refuses more than that; nothing is created or cut off
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            written = file.write(content)
    except OSError as error:
        raise _unavailable(path, error) from None
    if written != len(content):
        raise _refused(f"{path} took {written} of {len(content)} bytes.")


def _unavailable(path: Path, error: OSError) -> TrustError:
    return _refused(f"{path}: {error.strerror}. Is this program inside a TEE that is set up for attestation?")


def _refused(words: str) -> TrustError:
    return TrustError(f"no evidence from this machine: {words}", check="provider")
