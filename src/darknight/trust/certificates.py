"""Certificates and revocation lists that strangers send: read with limits, and never with a surprise."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from darknight.errors import TrustError
from darknight.trust.evidence import MAX_CERTIFICATES

# What the library raises when it meets something malformed, at once or when a field is looked at.
MALFORMED = (
    ValueError,
    TypeError,
    OverflowError,
    UnsupportedAlgorithm,
    InvalidSignature,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)

_PEM = re.compile(rb"-----BEGIN (CERTIFICATE|X509 CRL)-----[A-Za-z0-9+/=\s]+-----END \1-----")
_BEGIN = b"-----BEGIN "


@dataclass(frozen=True, kw_only=True)
class Bag:
    """Certificates and revocation lists, each once, in the order in which they came."""

    certificates: tuple[x509.Certificate, ...]
    lists: tuple[x509.CertificateRevocationList, ...]


@contextmanager
def without_warnings() -> Iterator[None]:
    """The library warns of oddities, such as the serial number 0 of every VCEK. Here it is a verdict or nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def read_bag(contents: Iterable[bytes]) -> Bag:
    """Each content is PEM, with any number of certificates or lists, or one of them as DER.

    Raises TrustError (check "format") on anything else.
    """
    certificates: dict[bytes, x509.Certificate] = {}
    lists: dict[bytes, x509.CertificateRevocationList] = {}
    for block in (block for content in contents for block in _blocks(content)):
        found = _parsed(block)
        if isinstance(found, x509.Certificate):
            certificates[found.public_bytes(Encoding.DER)] = found
        else:
            lists[found.public_bytes(Encoding.DER)] = found
        if len(certificates) + len(lists) > MAX_CERTIFICATES:
            raise _unreadable(f"there are more than {MAX_CERTIFICATES} of them")
    return Bag(certificates=tuple(certificates.values()), lists=tuple(lists.values()))


def read_root(content: bytes) -> bytes:
    """The one certificate in `content`, as DER. Raises TrustError (check "format") on anything else."""
    bag = read_bag([content])
    if len(bag.certificates) != 1 or bag.lists:
        raise _unreadable("exactly one root certificate is needed")
    return bag.certificates[0].public_bytes(Encoding.DER)


def key_hash(certificate: x509.Certificate) -> str:
    """SHA-256 of the public key (SubjectPublicKeyInfo, DER); empty if there is none that we can read."""
    try:
        key = certificate.public_key()
    except MALFORMED:
        return ""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def extensions_of(certificate: x509.Certificate) -> list[x509.Extension[x509.ExtensionType]]:
    """None of them where one is malformed, or there twice."""
    try:
        return list(certificate.extensions)
    except MALFORMED:
        return []


def _blocks(content: bytes) -> list[bytes]:
    if _BEGIN not in content:
        return [content]
    found = [match.group(0) for match in _PEM.finditer(content)]
    if len(found) != content.count(_BEGIN):
        raise _unreadable("a PEM file holds something else, or is damaged")
    return found


def _parsed(block: bytes) -> x509.Certificate | x509.CertificateRevocationList:
    loaders = (
        (x509.load_pem_x509_certificate, x509.load_pem_x509_crl)
        if block.startswith(_BEGIN)
        else (x509.load_der_x509_certificate, x509.load_der_x509_crl)
    )
    for load in loaders:
        try:
            return load(block)
        except MALFORMED:
            continue
    raise _unreadable("what is there is neither, in PEM or DER")


def _unreadable(words: str) -> TrustError:
    return TrustError(f"the certificates or revocation lists cannot be read: {words}.", check="format")
