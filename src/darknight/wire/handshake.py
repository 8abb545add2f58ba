"""The first frame in each direction: versions, and what a worker says of itself.

    enclave: {"darknight": "0.1.0", "protocol": 3, "door": token or null, "pipe": secret or null}
    worker:  {"darknight": "0.1.0", "protocol": 3, "door": token or null, "pipe": {"port": ..., "secret": ...} or null,
              "operator": ..., "device": ..., "memory": ...}
         or  {"darknight": "0.1.0", "protocol": 3, "refused": why}

"darknight" and "protocol" stay as they are in every version to come, so that any two versions can tell each other why
they do not work together. A worker answers in the protocol that it was spoken to in, if it is one of SPOKEN; an enclave
that is refused by a worker of an older one tries again in that. `door`: the tokens by which both ends know each other
at the worker's Unix socket, where shared memory is handed over. `pipe`, from protocol 3 on: what both ends make the
keys of a sealed pipe of (`wire.pipe`), and the port at which the worker waits for the enclave.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from darknight import __version__
from darknight.wire import fields
from darknight.wire.fields import BadFrame, Header, pack, unpack
from darknight.wire.pipe import SECRET

PROTOCOL = 3
SPOKEN = (1, 2, 3)  # in 1 every share is sent as it is
SEEDS = 2  # from this one on a seed may stand for a share
PIPES = 3  # and from this one on frames may go through a pipe

_TOKEN_BYTES = 16


class Mismatch(Exception):  # noqa: N818 - made into a refusal on one side and LinkClosed on the other
    """The two sides speak different versions of the protocol; in words, with the side to upgrade."""


class Older(Exception):  # noqa: N818 - who dials tries again
    """The worker refuses what was said, and speaks an older protocol that this enclave speaks too."""

    def __init__(self, words: str, protocol: int) -> None:
        super().__init__(words)
        self.protocol = protocol


@dataclass(frozen=True)
class Hello:
    """What an enclave says first."""

    version: str
    protocol: int
    door: bytes | None = field(repr=False)
    pipe: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Waiting:
    """Where a worker waits for the other end of a pipe, and its part of the keys."""

    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Welcome:
    """What a worker says of itself. Nothing of it is proven but the certificate under which it is said."""

    version: str
    protocol: int
    operator: str
    device: str
    memory: int
    door: bytes | None = field(repr=False)
    pipe: Waiting | None = None


def new_token() -> bytes:
    return secrets.token_bytes(_TOKEN_BYTES)


# --- the enclave ----------------------------------------------------------------------------------------------------
def hello(door: bytes | None, protocol: int = PROTOCOL, pipe: bytes | None = None) -> bytes:
    """pipe: this end's secret, if it wants one; from protocol 3 on."""
    return pack({**_versions(protocol), "door": _hex(door), **_of_pipes(protocol, _hex(pipe))})


def read_welcome(frame: bytes, said: int = PROTOCOL) -> Welcome | str:
    """What the worker says of itself, or why it refuses. said: the protocol of the hello.

    Raises Mismatch, Older or BadFrame.
    """
    header = unpack(frame)
    version, protocol = _checked_version(header, them="the worker", us="this enclave")
    if header.keys() == {"darknight", "protocol", "refused"}:
        words = fields.printable(fields.text(header["refused"]))
        if protocol < said:
            raise Older(words, protocol)
        return words
    keys = {"darknight", "protocol", "door", "operator", "device", "memory", *_of_pipes(protocol, None)}
    if header.keys() != keys or protocol > said:
        raise BadFrame("a first frame with other keys than a worker's, or in another protocol than was spoken")
    return Welcome(
        version=version,
        protocol=protocol,
        operator=fields.printable(fields.text(header["operator"], 200)),
        device=fields.printable(fields.text(header["device"], 200)),
        memory=fields.number(header["memory"]),
        door=_token(header["door"]),
        pipe=_waiting(header.get("pipe")),
    )


# --- the worker -----------------------------------------------------------------------------------------------------
def welcome(
    about: Mapping[str, object], door: bytes | None, protocol: int = PROTOCOL, pipe: Waiting | None = None
) -> bytes:
    """about: operator, device and memory (bytes). protocol: of the hello."""
    place = None if pipe is None else {"port": pipe.port, "secret": pipe.secret.hex()}
    return pack(
        {
            **_versions(protocol),
            "door": _hex(door),
            **_of_pipes(protocol, place),
            "operator": about["operator"],
            "device": about["device"],
            "memory": about["memory"],
        }
    )


def refusal(words: str, protocol: int = PROTOCOL) -> bytes:
    """protocol: of the hello, if that could be read."""
    return pack({**_versions(protocol), "refused": words[: fields.NAME_LIMIT].encode(errors="replace").decode()})


def read_hello(frame: bytes) -> Hello:
    """Raises Mismatch or BadFrame."""
    header = unpack(frame)
    version, protocol = _checked_version(header, them="the enclave", us="this worker")
    if header.keys() != {"darknight", "protocol", "door", *_of_pipes(protocol, None)}:
        raise BadFrame("a first frame with other keys than an enclave's")
    secret = header.get("pipe")
    pipe = None if secret is None else fields.hexadecimal(secret, SECRET)
    return Hello(version, protocol, _token(header["door"]), pipe)


# --- both -----------------------------------------------------------------------------------------------------------
def _versions(protocol: int) -> Header:
    return {"darknight": __version__, "protocol": protocol}


def _checked_version(header: Header, *, them: str, us: str) -> tuple[str, int]:
    """Looks at nothing but the versions: everything else may be different in another protocol."""
    version, protocol = (
        fields.printable(fields.text(header.get("darknight"), 50)),
        fields.number(header.get("protocol")),
    )
    if protocol not in SPOKEN:
        older = them if protocol < PROTOCOL else us
        raise Mismatch(
            f"{them} speaks protocol {protocol} (darknight {version}) and {us} {PROTOCOL} (darknight {__version__}). "
            f"Upgrade {older}."
        )
    return version, protocol


def _of_pipes(protocol: int, value: object) -> Header:
    return {"pipe": value} if protocol >= PIPES else {}


def _waiting(value: object) -> Waiting | None:
    if value is None:
        return None
    found = fields.an_object(value)
    if found.keys() != {"port", "secret"}:
        raise BadFrame("a pipe with other keys than a port and a secret")
    port = fields.number(found["port"])
    if not 0 < port < 1 << 16:
        raise BadFrame("a pipe at a port that is none")
    return Waiting(port, fields.hexadecimal(found["secret"], SECRET))


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _token(value: object) -> bytes | None:
    return None if value is None else fields.hexadecimal(value, _TOKEN_BYTES)
