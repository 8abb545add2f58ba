"""Evidence: a quote with what is needed to judge it, as it travels from an enclave to its client."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

from darknight.errors import TrustError
from darknight.trust.quote import FORMATS, MAX_QUOTE_BYTES, Facts, read_quote

MAX_COLLATERAL_BYTES = 1 << 20
MAX_CERTIFICATE_BYTES = 1 << 16
MAX_CERTIFICATES = 16

_WORDS = {"format", "quote", "collateral", "certificates"}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a machine shows for itself. Nothing of it is trusted before `darknight.trust.verify.attested`.

    format: "sgx", "tdx" or "snp". collateral: Intel's, as JSON. certificates: the chain of SNP and revocation lists,
    each PEM (with any number of them) or DER.
    """

    format: str
    quote: bytes = field(repr=False)
    collateral: bytes | None = field(default=None, repr=False)
    certificates: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        _limit("quote", len(self.quote), MAX_QUOTE_BYTES)
        _limit("collateral", len(self.collateral or b""), MAX_COLLATERAL_BYTES)
        if len(self.certificates) > MAX_CERTIFICATES:
            raise _malformed(f"{len(self.certificates)} certificate files; at most {MAX_CERTIFICATES} are needed.")
        for certificate in self.certificates:
            _limit("certificate", len(certificate), MAX_CERTIFICATE_BYTES)
        if self.facts.format != self.format:
            raise _malformed(f"it is called {self.format[:8]!r}, and its quote is of the format {self.facts.format}.")

    @classmethod
    def of(cls, quote: bytes, *, collateral: bytes | None = None, certificates: tuple[bytes, ...] = ()) -> Evidence:
        """Evidence whose format is that of the quote."""
        return cls(format=read_quote(quote).format, quote=quote, collateral=collateral, certificates=certificates)

    @property
    def facts(self) -> Facts:
        """What the quote says of itself."""
        return read_quote(self.quote)

    def to_words(self) -> dict[str, object]:
        """For JSON."""
        return {
            "format": self.format,
            "quote": _text(self.quote),
            "collateral": None if self.collateral is None else _text(self.collateral),
            "certificates": [_text(certificate) for certificate in self.certificates],
        }

    @classmethod
    def from_words(cls, words: object) -> Evidence:
        """The inverse of `to_words`. Raises TrustError (check "format") on anything else."""
        if not isinstance(words, Mapping) or set(words) != _WORDS:
            raise _malformed(f"it needs exactly the fields {', '.join(sorted(_WORDS))}.")
        certificates = words["certificates"]
        if words["format"] not in FORMATS:
            raise _malformed(f"its format is none of {', '.join(FORMATS)}.")
        if not isinstance(certificates, list) or len(certificates) > MAX_CERTIFICATES:
            raise _malformed(f"its certificates are no list of at most {MAX_CERTIFICATES}.")
        collateral = words["collateral"]
        return cls(
            format=str(words["format"]),
            quote=_bytes("quote", words["quote"], MAX_QUOTE_BYTES),
            collateral=None if collateral is None else _bytes("collateral", collateral, MAX_COLLATERAL_BYTES),
            certificates=tuple(_bytes("certificate", entry, MAX_CERTIFICATE_BYTES) for entry in certificates),
        )


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(name: str, text: object, limit: int) -> bytes:
    if not isinstance(text, str):
        raise _malformed(f"its {name} is no text.")
    _limit(name, len(text) * 3 // 4 - 2, limit)
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _malformed(f"its {name} is not in base64.") from None
    if _text(content) != text:
        raise _malformed(f"its {name} is not in base64 as it is written here.")
    return content


def _limit(name: str, size: int, limit: int) -> None:
    if size > limit:
        raise _malformed(f"its {name} has {size:,} bytes; at most {limit:,} are read.")


def _malformed(words: str) -> TrustError:
    return TrustError(f"the evidence cannot be read: {words}", check="format")
