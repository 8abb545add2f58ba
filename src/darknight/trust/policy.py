"""The policy: what a client accepts as its enclave, in a TOML file.

::

    measurements = ["5d2a..."]              # MRENCLAVE (64 hex digits), MRTD or SNP's launch digest (96)
    signers = ["815f..."]                   # optional: MRSIGNER, or the digest of SNP's id key
    product = 7                             # optional: ISVPRODID of SGX
    minimum_svn = 3                         # optional: ISVSVN of SGX, or the guest's SVN of SNP
    configurations = ["9ac1..."]            # optional: hashes of a configuration; keys are released to no other
    chip_ids = ["c384..."]                  # optional: SNP's chip id (128), or the PPID of Intel's certificate (32)
    allow_status = ["SWHardeningNeeded"]    # optional: TCB states of Intel besides UpToDate
    highest_vmpl = 0                        # the least privileged level of an SNP guest that may ask; 0 if not given
    revocation_lists = ["milan.crl"]        # optional: AMD's, PEM or DER
    require_revocation = true               # refuse SNP evidence for which there is no revocation list
    insecure_simulated_root = "root.pem"    # for trying things out: a software platform is no protection at all

    [rtmr]                                  # TDX, where MRTD is the firmware alone: what the others must be
    1 = ["ab12..."]
    2 = ["cd34..."]

    [minimum_tcb]                           # SNP: of the reported TCB
    bootloader = 3
    snp = 8
    microcode = 115

Paths are relative to the file. A list means: any of these.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from darknight.errors import UsageError

# Revoked is missing: nothing makes a revoked platform good.
STATUSES = (
    "UpToDate",
    "SWHardeningNeeded",
    "ConfigurationNeeded",
    "ConfigurationAndSWHardeningNeeded",
    "OutOfDate",
    "OutOfDateConfigurationNeeded",
    "TDRelaunchAdvised",
    "TDRelaunchAdvisedConfigurationNeeded",
)
TCB_PARTS = ("fmc", "bootloader", "tee", "snp", "microcode")
MAX_FILE_BYTES = 1 << 20

_HEX = re.compile(r"[0-9a-fA-F]*")
_SIZES = {"measurements": (32, 48), "signers": (32, 48), "configurations": (32, 48, 64), "chip_ids": (16, 64)}
_REGISTER_BYTES = (48,)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is accepted. Empty collections compare nothing, but `attested` refuses a policy without a measurement."""

    measurements: frozenset[bytes] = frozenset()
    signers: frozenset[bytes] = frozenset()
    product: int | None = None
    minimum_svn: int = 0
    configurations: frozenset[bytes] = frozenset()
    chip_ids: frozenset[bytes] = frozenset()
    allow_status: frozenset[str] = frozenset()
    rtmr: Mapping[int, frozenset[bytes]] = field(default_factory=dict)
    minimum_tcb: Mapping[str, int] = field(default_factory=dict)
    highest_vmpl: int = 0
    revocation_lists: tuple[bytes, ...] = ()
    require_revocation: bool = False
    insecure_simulated_root: bytes | None = None

    def __post_init__(self) -> None:
        for key, sizes in _SIZES.items():
            _sizes(key, getattr(self, key), sizes)
        for register, values in self.rtmr.items():
            if register not in range(4) or not values:
                raise UsageError(f"rtmr {register}: a TD has RTMR 0 to 3, and each that is named needs a value.")
            _sizes(f"rtmr {register}", values, _REGISTER_BYTES)
        if unknown := sorted(self.allow_status - set(STATUSES)):
            raise UsageError(f"unknown TCB status {', '.join(unknown)}; use some of {', '.join(STATUSES)}.")
        if unknown := sorted(set(self.minimum_tcb) - set(TCB_PARTS)):
            raise UsageError(f"minimum_tcb: unknown part {', '.join(unknown)}; use some of {', '.join(TCB_PARTS)}.")
        if not all(0 <= value <= 255 for value in self.minimum_tcb.values()):
            raise UsageError("minimum_tcb: each part is a whole number from 0 to 255.")
        if not 0 <= self.highest_vmpl <= 3:
            raise UsageError(f"highest_vmpl = {self.highest_vmpl}; needs a whole number from 0 to 3.")
        if self.minimum_svn < 0 or (self.product is not None and self.product < 0):
            raise UsageError("minimum_svn and product need whole numbers, 0 or more.")


def read_policy(path: Path) -> Policy:
    """What the file says. Every mistake raises UsageError, which names the file and the remedy."""
    try:
        words = tomllib.loads(_content(path).decode())
        return _policy(path.parent, words)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file ({error}). Correct it.") from error
    except RecursionError:
        raise UsageError(f"{path}: not a policy: it is nested too deeply. Correct it.") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _policy(folder: Path, words: dict[str, Any]) -> Policy:
    known = set(Policy.__dataclass_fields__)
    if unknown := sorted(set(words) - known):
        raise UsageError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
    found: dict[str, Any] = {}
    for key, value in words.items():
        if key in _SIZES:
            found[key] = _hex_values(key, value)
        elif key == "allow_status":
            found[key] = frozenset(_texts(key, value))
        elif key in ("product", "minimum_svn", "highest_vmpl"):
            found[key] = _whole(key, value)
        elif key == "rtmr":
            table = _table(key, value)
            found[key] = {_register(name): _hex_values(f"rtmr {name}", entry) for name, entry in table.items()}
        elif key == "minimum_tcb":
            found[key] = {name: _whole(f"minimum_tcb, {name}", entry) for name, entry in _table(key, value).items()}
        elif key == "revocation_lists":
            found[key] = tuple(_content(folder / name) for name in _texts(key, value))
        elif key == "insecure_simulated_root":
            (name,) = _texts(key, [value])
            found[key] = _content(folder / name)
        else:
            if not isinstance(value, bool):
                raise UsageError(f"{key} needs true or false.")
            found[key] = value
    return Policy(**found)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Check the path.") from None
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{path} has more than {MAX_FILE_BYTES:,} bytes. Give the right file.")
    return content


def _texts(key: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise UsageError(f"{key} needs texts in quotation marks, in a list if it may be several.")
    return value


def _hex_values(key: str, value: object) -> frozenset[bytes]:
    texts = _texts(key, value)
    if not all(_HEX.fullmatch(text) and len(text) % 2 == 0 for text in texts):
        raise UsageError(f"{key} needs hexadecimal digits, two for each byte.")
    return frozenset(bytes.fromhex(text) for text in texts)


def _whole(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{key} needs a whole number.")
    return value


def _table(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{key} needs a table, [{key}].")
    return value


def _register(name: str) -> int:
    return int(name) if name in ("0", "1", "2", "3") else -1


def _sizes(key: str, values: frozenset[bytes], sizes: tuple[int, ...]) -> None:
    if any(len(value) not in sizes for value in values):
        digits = " or ".join(str(2 * size) for size in sizes)
        raise UsageError(f"{key}: each value has {digits} hexadecimal digits.")
