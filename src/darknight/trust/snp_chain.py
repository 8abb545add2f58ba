"""AMD's certificates: from a bag of them to the key that may sign a report.

Keys are used from the pinned root downwards, so nothing is ever verified with a key that a stranger chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from darknight.errors import TrustError
from darknight.trust.certificates import MALFORMED, Bag, extensions_of, key_hash

# SHA-256 of the root's public key (SubjectPublicKeyInfo, DER) -> the product whose chips it vouches for.
AMD_ROOTS: Mapping[str, str] = MappingProxyType(
    {
        "9f056bee44377e29308cb5ffa895bdfb62d18881fa6bed8d6f075b0204089cb9": "Milan",
        "429a69c9422aa258ee4d8db5fcda9c6470ef15f8cd5a9cebd6cbc7d90b863831": "Genoa",
        "4f125410563a2ab9a50356f9243f6fe0b6f73de98603f53f90339c70e9d7ad08": "Turin",
    }
)
TURIN = "Turin"

_UNDERSTOOD = (x509.BasicConstraints, x509.KeyUsage)  # of what may be critical
_AMD = "1.3.6.1.4.1.3704.1"
# The eight bytes of a TCB version: bootloader, TEE, four that are reserved, SNP, microcode. Turin begins with its FMC.
_TCB = ("3.1", "3.2", "3.4", "3.5", "3.6", "3.7", "3.3", "3.8")
_TURIN_TCB = ("3.9", "3.1", "3.2", "3.3", "3.5", "3.6", "3.7", "3.8")
_RESERVED = {"3.4", "3.5", "3.6", "3.7"}
_HARDWARE_ID, _PROVIDER_ID = "4", "5"
_HARDWARE_ID_BYTES, _TURIN_ID_BYTES = 64, 8


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A key that may sign reports, and why.

    hardware_id: of the chip; None for a VLEK, which has none. tcb: the eight bytes that the key was made for.
    """

    kind: str
    product: str
    key: ec.EllipticCurvePublicKey
    hardware_id: bytes | None
    tcb: bytes
    intermediate: x509.Certificate
    root: x509.Certificate


def find_chain(bag: Bag, *, vlek: bool, now: int, simulated_root: bytes | None) -> Chain:
    """The chain of the one leaf of this kind, from a pinned root. Raises TrustError where there is none."""
    with _malformed("chain"):
        leaf = _leaf(bag, vlek=vlek)
        root, product = _root(bag, simulated_root)
        intermediate = _issued(bag.certificates, root, leaf)
        for certificate, name in ((root, "root"), (intermediate, "intermediate"), (leaf, "leaf")):
            _in_time(certificate, f"{name} certificate", now)
        key = leaf.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise _broken("the leaf's key is not one of ECDSA on P-384.")
        values, turin = _amd_values(leaf), product == TURIN
        size = _TURIN_ID_BYTES if turin else _HARDWARE_ID_BYTES
        return Chain(
            kind="VLEK" if vlek else "VCEK",
            product=product,
            key=key,
            hardware_id=None if vlek else _octets(values.get(_HARDWARE_ID), size),
            tcb=bytes(_part(values, number) for number in (_TURIN_TCB if turin else _TCB)),
            intermediate=intermediate,
            root=root,
        )


def check_revocation(bag: Bag, chain: Chain, *, now: int) -> None:
    """Raises TrustError (check "revocation") unless a current list of the chain's root says nothing against it."""
    with _malformed("revocation"):
        lists = [each for each in bag.lists if each.issuer == chain.root.subject]
        if not lists:
            raise _revoked("no list that was given is by the root of this chain")
        for each in lists:
            _check_list(each, chain, now)


def _check_list(each: x509.CertificateRevocationList, chain: Chain, now: int) -> None:
    key = chain.root.public_key()
    if not isinstance(key, rsa.RSAPublicKey) or not each.is_signature_valid(key):
        raise _revoked("a list in the name of the root is not signed by it")
    if any(extension.critical for part in (each, *each) for extension in part.extensions):
        raise _revoked("a list has a critical extension that is unknown here")
    end = each.next_update_utc
    if end is None or not each.last_update_utc <= _time(now) <= end:
        raise _revoked("a list is not of this time. Fetch a new one")
    for certificate in (chain.root, chain.intermediate):
        if each.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None:
            raise _revoked("a certificate of the chain is revoked")


@contextmanager
def _malformed(check: str) -> Iterator[None]:
    """What the library meets in a stranger's bytes is a reason to refuse them, not to stop."""
    try:
        yield
    except TrustError:
        raise
    except MALFORMED:
        raise TrustError("a certificate or revocation list is malformed.", check=check) from None


def _leaf(bag: Bag, *, vlek: bool) -> x509.Certificate:
    """The one certificate with AMD's extension for a chip (VCEK) or a provider (VLEK)."""
    mark, other, name = (_PROVIDER_ID, _HARDWARE_ID, "VLEK") if vlek else (_HARDWARE_ID, _PROVIDER_ID, "VCEK")
    marked = [each for each in bag.certificates if mark in (values := _amd_values(each)) and other not in values]
    if len(marked) != 1:
        raise _broken(f"{len(marked)} {name} certificates; exactly one is needed. Give the one of this report.")
    return marked[0]


def _root(bag: Bag, simulated_root: bytes | None) -> tuple[x509.Certificate, str]:
    """The certificate of a pinned key, signed by that key: its names and dates are then AMD's own."""
    pins = AMD_ROOTS if simulated_root is None else _simulated_pin(simulated_root)
    for certificate in bag.certificates:
        product = pins.get(key_hash(certificate))
        if product is not None and _is_authority(certificate) and _signed_by(certificate, certificate):
            return certificate, product
    whose = "AMD's root of Milan, Genoa or Turin" if simulated_root is None else "the simulated root"
    raise _broken(f"the chain does not end at {whose}. Give all of its certificates.")


def _simulated_pin(root: bytes) -> dict[str, str]:
    certificate = x509.load_der_x509_certificate(root)
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    product = str(names[0].value).rpartition("-")[2] if names else ""
    return {key_hash(certificate): product} if product in AMD_ROOTS.values() else {}


def _issued(
    certificates: tuple[x509.Certificate, ...], root: x509.Certificate, leaf: x509.Certificate
) -> x509.Certificate:
    """The certificate that the root signed, and that signed the leaf."""
    for each in certificates:
        if each != root and _is_authority(each) and _signed_by(each, root) and _signed_by(leaf, each):
            if not _is_leaf(leaf):
                raise _broken("the leaf certificate claims what no leaf may.")
            return each
    raise _broken("no certificate leads from the root to the leaf. Give the ASK, or ASVK, of this product.")


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        if not isinstance(issuer.public_key(), rsa.RSAPublicKey):
            return False
        certificate.verify_directly_issued_by(issuer)
    except MALFORMED:
        return False
    return True


def _is_authority(certificate: x509.Certificate) -> bool:
    constraints, usage = _powers(certificate)
    return _is_understood(certificate) and bool(constraints and constraints.ca and usage and usage.key_cert_sign)


def _is_leaf(certificate: x509.Certificate) -> bool:
    """AMD's leaves say nothing about what their key is for; one that does must not say too much."""
    constraints, usage = _powers(certificate)
    signs_others = bool((constraints and constraints.ca) or (usage and usage.key_cert_sign))
    return _is_understood(certificate) and not signs_others and (usage is None or usage.digital_signature)


def _powers(certificate: x509.Certificate) -> tuple[x509.BasicConstraints | None, x509.KeyUsage | None]:
    values = [each.value for each in extensions_of(certificate)]
    constraints = [value for value in values if isinstance(value, x509.BasicConstraints)]
    usages = [value for value in values if isinstance(value, x509.KeyUsage)]
    return (constraints[0] if constraints else None, usages[0] if usages else None)


def _is_understood(certificate: x509.Certificate) -> bool:
    """Whether there is no critical extension that is unknown here."""
    found = extensions_of(certificate)
    return bool(found) and all(isinstance(each.value, _UNDERSTOOD) for each in found if each.critical)


def _in_time(certificate: x509.Certificate, name: str, now: int) -> None:
    if not certificate.not_valid_before_utc <= _time(now) <= certificate.not_valid_after_utc:
        span = f"{certificate.not_valid_before_utc:%Y-%m-%d} to {certificate.not_valid_after_utc:%Y-%m-%d}"
        raise TrustError(f"the {name} is valid from {span}, and not at this time.", check="dates")


def _time(now: int) -> datetime:
    return datetime.fromtimestamp(now, UTC)


def _amd_values(certificate: x509.Certificate) -> dict[str, bytes]:
    """AMD's own extensions by the end of their number."""
    return {
        each.oid.dotted_string.removeprefix(f"{_AMD}."): each.value.value
        for each in extensions_of(certificate)
        if each.oid.dotted_string.startswith(f"{_AMD}.") and isinstance(each.value, x509.UnrecognizedExtension)
    }


def _part(values: Mapping[str, bytes], number: str) -> int:
    """A DER INTEGER from 0 to 255; reserved ones may be missing."""
    value = values.get(number, b"\x02\x01\x00" if number in _RESERVED else b"")
    if len(value) == 3 and value[:2] == b"\x02\x01" and value[2] < 0x80:
        return value[2]
    if len(value) == 4 and value[:3] == b"\x02\x02\x00" and value[3] >= 0x80:
        return value[3]
    raise _broken("the leaf certificate does not say which TCB it is for.")


def _octets(value: bytes | None, size: int) -> bytes:
    """AMD writes the chip's number as it is; newer certificates may wrap it as an OCTET STRING."""
    if value is not None and value[:2] == bytes((4, size)) and len(value) == size + 2:
        return value[2:]
    if value is None or len(value) != size:
        raise _broken(f"the leaf certificate names no chip by {size} bytes.")
    return value


def _broken(words: str) -> TrustError:
    return TrustError(words, check="chain")


def _revoked(words: str) -> TrustError:
    return TrustError(f"{words}.", check="revocation")
