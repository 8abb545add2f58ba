"""Messages between a data holder and an enclave: small JSON objects, and raw chunks of what is already sealed.

A request is signed by the client's key; this file only carries the signature (darknight.trust checks it). Whoever
sends something that is no message gets an error, and nothing of it is looked at any further.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from darknight.errors import other_format
from darknight.wire.codec import BadFrame

SERVICE = "darknight.Enclave"
ATTEST, SUBMIT, UPLOAD, RELEASE = "Attest", "Submit", "Upload", "Release"
STATUS, WATCH, CANCEL, FETCH = "Status", "Watch", "Cancel", "Fetch"

CHUNK = 1 << 20  # bytes of a piece of a file
LARGEST = 4 << 20  # bytes of any message
CONFIGURATION = 1  # of what an enclave says of itself; it goes up with every change of the conversation
_FORMAT = 1
_DIGEST = 32  # bytes of salts, keys and digests
_KINDS: dict[str, Any] = {
    "model": dict,
    "weights": str | None,
    "recipe": dict | None,
    "augment": bool,
    "scheme": dict,
    "leakage_budget": float | None,
    "save_every": float,
    "top": int,
}
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a conversation. body: JSON as it was signed."""

    method: str
    nonce: bytes
    sequence: int
    client: bytes
    body: bytes
    signature: bytes

    def encode(self) -> bytes:
        words = {
            "nonce": self.nonce.hex(),
            "sequence": self.sequence,
            "client": self.client.hex(),
            "body": self.body.decode(),
            "signature": self.signature.hex(),
        }
        return dump(words)

    @classmethod
    def decode(cls, method: str, data: bytes) -> Request:
        words = load(data)
        sequence, body = words.get("sequence"), words.get("body")
        if words.keys() != {"nonce", "sequence", "client", "body", "signature"}:
            raise BadFrame("a request with unknown or missing parts")
        if type(sequence) is not int or not 0 < sequence < 1 << 63 or not isinstance(body, str):
            raise BadFrame("a request whose parts are of the wrong kind")
        return cls(
            method=method,
            nonce=from_hex(words["nonce"]),
            sequence=sequence,
            client=from_hex(words["client"]),
            body=body.encode(errors="surrogatepass"),
            signature=from_hex(words["signature"]),
        )


@dataclass(frozen=True, kw_only=True)
class JobText:
    """What a client asks for, in plain values that nothing was made of yet.

    salt: fresh, so that two jobs never have one name. client: the key whose holder it belongs to. model: {"name": ...}
    or {"layers": [...]}. weights: digest of a sealed file of weights. data: digest of the sealed set's manifest. part:
    of the data, for predictions.
    """

    salt: str
    client: str
    kind: str
    model: Mapping[str, Any]
    weights: str | None
    recipe: Mapping[str, Any] | None
    augment: bool
    scheme: Mapping[str, Any]
    leakage_budget: float | None
    save_every: float
    data: str
    part: str
    top: int

    def encode(self) -> bytes:
        return dump({"format": _FORMAT, **asdict(self)})

    @property
    def name(self) -> str:
        """The job's: nobody can make another text of the same name."""
        return hashlib.sha256(self.encode()).hexdigest()[:32]

    @classmethod
    def decode(cls, data: bytes) -> JobText:
        words = load(data)
        if (found := words.pop("format", None)) != _FORMAT:
            raise BadFrame(f"a job in {other_format(found, reads=_FORMAT)}")
        kinds = {field.name: _KINDS.get(field.name, str) for field in fields(cls)}
        if words.keys() != kinds.keys() or not all(isinstance(words[name], kind) for name, kind in kinds.items()):
            raise BadFrame("a job with unknown or missing parts, or parts of the wrong kind")
        text = cls(**words)
        digests = (text.salt, text.client, text.data, *([] if text.weights is None else [text.weights]))
        if not all(len(from_hex(digest)) == _DIGEST for digest in digests) or text.encode() != data:
            raise BadFrame("a job that is not written as it must be")
        return text


def dump(words: Mapping[str, Any]) -> bytes:
    """One text for one meaning: it is hashed and signed."""
    return json.dumps(words, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()


def load(data: bytes) -> dict[str, Any]:
    """A JSON object of a reasonable size, or BadFrame."""
    if len(data) > LARGEST:
        raise BadFrame(f"a message of {len(data)} bytes; at most {LARGEST}")
    try:
        words = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise BadFrame("a message that is not JSON") from None
    if not isinstance(words, dict):
        raise BadFrame("a message that is not a JSON object")
    return words


def from_hex(text: object, *, longest: int = LARGEST) -> bytes:
    if not isinstance(text, str) or len(text) > 2 * longest or not _HEX.fullmatch(text):
        raise BadFrame("bytes that are not written in hexadecimal")
    return bytes.fromhex(text)


def _refuse(constant: str) -> object:
    raise ValueError(constant)
