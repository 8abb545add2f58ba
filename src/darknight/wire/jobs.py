"""Messages between a data holder and an enclave: small JSON objects, and raw chunks of what is already sealed.

A request is signed by the client's key; this file only carries the signature (darknight.trust checks it). Whoever
sends something that is no message gets an error, and nothing of it is looked at any further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from darknight.wire.codec import BadFrame

SERVICE = "darknight.Enclave"
ATTEST, SUBMIT, UPLOAD, RELEASE = "Attest", "Submit", "Upload", "Release"
STATUS, WATCH, CANCEL, FETCH = "Status", "Watch", "Cancel", "Fetch"

CHUNK = 1 << 20  # bytes of a piece of a file
LARGEST = 4 << 20  # bytes of any message
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
