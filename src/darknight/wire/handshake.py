"""The first frame in each direction: versions, and what a worker says of itself.

    enclave: {"darknight": "0.1.0", "protocol": 1, "door": token or null}
    worker:  {"darknight": "0.1.0", "protocol": 1, "door": token or null, "operator": ..., "device": ..., "memory": ...}
         or  {"darknight": "0.1.0", "protocol": 1, "refused": why}

"darknight" and "protocol" stay as they are in every version to come, so that any two versions can tell each other why
they do not work together. `door`: the tokens by which both ends know each other at the worker's Unix socket, where
shared memory is handed over.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from darknight import __version__
from darknight.wire import fields
from darknight.wire.fields import BadFrame, Header, pack, unpack

PROTOCOL = 1

_TOKEN_BYTES = 16


class Mismatch(Exception):  # noqa: N818 - made into a refusal on one side and LinkClosed on the other
    """The two sides speak different versions of the protocol; in words, with the side to upgrade."""


@dataclass(frozen=True)
class Hello:
    """What an enclave says first."""

    version: str
    door: bytes | None = field(repr=False)


@dataclass(frozen=True)
class Welcome:
    """What a worker says of itself. Nothing of it is proven but the certificate under which it is said."""

    version: str
    protocol: int
    operator: str
    device: str
    memory: int
    door: bytes | None = field(repr=False)


def new_token() -> bytes:
    return secrets.token_bytes(_TOKEN_BYTES)


# --- the enclave ----------------------------------------------------------------------------------------------------
def hello(door: bytes | None) -> bytes:
    return pack({**_versions(), "door": None if door is None else door.hex()})


def read_welcome(frame: bytes) -> Welcome | str:
    """What the worker says of itself, or why it refuses. Raises Mismatch or BadFrame."""
    header = unpack(frame)
    version = _checked_version(header, them="the worker", us="this enclave")
    if header.keys() == {"darknight", "protocol", "refused"}:
        return fields.printable(fields.text(header["refused"]))
    if header.keys() != {"darknight", "protocol", "door", "operator", "device", "memory"}:
        raise BadFrame("a first frame with other keys than a worker's")
    return Welcome(
        version=version,
        protocol=PROTOCOL,
        operator=fields.printable(fields.text(header["operator"], 200)),
        device=fields.printable(fields.text(header["device"], 200)),
        memory=fields.number(header["memory"]),
        door=_token(header["door"]),
    )


# --- the worker -----------------------------------------------------------------------------------------------------
def welcome(about: Mapping[str, object], door: bytes | None) -> bytes:
    """about: operator, device and memory (bytes)."""
    return pack(
        {
            **_versions(),
            "door": None if door is None else door.hex(),
            "operator": about["operator"],
            "device": about["device"],
            "memory": about["memory"],
        }
    )


def refusal(words: str) -> bytes:
    return pack({**_versions(), "refused": words[: fields.NAME_LIMIT].encode(errors="replace").decode()})


def read_hello(frame: bytes) -> Hello:
    """Raises Mismatch or BadFrame."""
    header = unpack(frame)
    version = _checked_version(header, them="the enclave", us="this worker")
    if header.keys() != {"darknight", "protocol", "door"}:
        raise BadFrame("a first frame with other keys than an enclave's")
    return Hello(version, _token(header["door"]))


# --- both -----------------------------------------------------------------------------------------------------------
def _versions() -> Header:
    return {"darknight": __version__, "protocol": PROTOCOL}


def _checked_version(header: Header, *, them: str, us: str) -> str:
    """Looks at nothing but the versions: everything else may be different in another protocol."""
    version, protocol = (
        fields.printable(fields.text(header.get("darknight"), 50)),
        fields.number(header.get("protocol")),
    )
    if protocol != PROTOCOL:
        older = them if protocol < PROTOCOL else us
        raise Mismatch(
            f"{them} speaks protocol {protocol} (darknight {version}) and {us} {PROTOCOL} (darknight {__version__}). "
            f"Upgrade {older}."
        )
    return version


def _token(value: object) -> bytes | None:
    if value is None:
        return None
    try:
        token = bytes.fromhex(fields.text(value, 2 * _TOKEN_BYTES))
    except ValueError:
        token = b""
    if len(token) != _TOKEN_BYTES:
        raise BadFrame(f"something else where {_TOKEN_BYTES} bytes in hexadecimal are due")
    return token
