"""The certificates and the collateral of simulated evidence: what Intel does, done by a program with keys in a file."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from darknight.errors import UsageError
from darknight.trust.fresh import fresh_nonce
from darknight.trust.simulated_quotes import raw_signature, sgx_extension
from darknight.types import Secret

KEY_FILE = "simulated-root-key.pem"
ROOT_FILE = "simulated-root.pem"
ORGANISATION = "DarKnight SIMULATION, not Intel"

ROOT, PROCESSOR, PCK, SIGNING = "SGX Root CA", "SGX PCK Processor CA", "SGX PCK Certificate", "SGX TCB Signing"

_SGX_EXTENSIONS = x509.ObjectIdentifier("1.2.840.113741.1.13.1")
_ROOT_YEARS, _ROOT_HISTORY = 10, timedelta(days=365)  # it is older than whatever it signs
_NO_USAGE = dict.fromkeys(
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
    False,
)


@dataclass(frozen=True, kw_only=True)
class Span:
    """From when until when certificates, lists and collateral are valid."""

    start: datetime
    end: datetime


class Authority(Secret):
    """A root in a folder, and fresh keys below it: one that certifies a processor, and one that signs collateral."""

    def __init__(self, folder: Path) -> None:
        root_key, self._root = _root_in(folder)
        below = {name: ec.generate_private_key(ec.SECP256R1()) for name in (PROCESSOR, PCK, SIGNING)}
        self._keys = {ROOT: root_key, **below}

    @property
    def root_certificate(self) -> bytes:
        """PEM."""
        return _pem(self._root)

    @property
    def processor_key(self) -> ec.EllipticCurvePrivateKey:
        """The PCK: it signs for the quoting enclave."""
        return self._keys[PCK]

    def chain(self, span: Span) -> bytes:
        """The PCK's certificate up to the root, PEM, as it stands in a quote."""
        return _pem(self._certificate(PCK, PROCESSOR, span), self._certificate(PROCESSOR, ROOT, span), self._root)

    def collateral(self, *, tcb_info: str, qe_identity: str, span: Span, revoked: Collection[str] = ()) -> bytes:
        """Intel's JSON: both statements signed, and the revocation lists. revoked: PCK, PROCESSOR, SIGNING."""
        from dcap_qvl import QuoteCollateralV3

        issuers = _pem(self._certificate(SIGNING, ROOT, span), self._root).decode()
        key = self._keys[SIGNING]
        collateral = QuoteCollateralV3(
            pck_crl_issuer_chain=_pem(self._certificate(PROCESSOR, ROOT, span), self._root).decode(),
            root_ca_crl=self._list(ROOT, span, [name for name in (PROCESSOR, SIGNING) if name in revoked]),
            pck_crl=self._list(PROCESSOR, span, [name for name in (PCK,) if name in revoked]),
            tcb_info_issuer_chain=issuers,
            tcb_info=tcb_info,
            tcb_info_signature=raw_signature(key, tcb_info.encode()),
            qe_identity_issuer_chain=issuers,
            qe_identity=qe_identity,
            qe_identity_signature=raw_signature(key, qe_identity.encode()),
        )
        return str(collateral.to_json()).encode()

    def _certificate(self, name: str, issuer: str, span: Span) -> x509.Certificate:
        depth = 0 if name == PROCESSOR else None
        return certificate(name, self._keys[name], issuer, self._keys[issuer], span, depth=depth)

    def _list(self, issuer: str, span: Span, revoked: Collection[str]) -> bytes:
        key = self._keys[issuer]
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(_name(issuer))
            .last_update(span.start)
            .next_update(span.end)
            .add_extension(x509.CRLNumber(1), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        )
        for name in revoked:
            number = serial_number(self._keys[name])
            entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(span.start).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    span: Span,
    *,
    depth: int | None,
) -> x509.Certificate:
    """depth: how many authorities may follow; None for a certificate that signs no other."""
    authority = depth is not None
    usage = x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **_NO_USAGE)
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(serial_number(key))
        .not_valid_before(span.start)
        .not_valid_after(span.end)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=depth), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(above, critical=False)
    )
    if name == PCK:
        builder = builder.add_extension(x509.UnrecognizedExtension(_SGX_EXTENSIONS, sgx_extension()), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def serial_number(key: ec.EllipticCurvePrivateKey) -> int:
    """Certificates are made anew for each piece of evidence; a number that goes with the key can be revoked."""
    return int.from_bytes(x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest[:16], "big") | 1


def _root_in(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The root of this folder; made there first if there is none. Whoever dies meanwhile leaves no half of it."""
    secret = folder / KEY_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not secret.exists():
            _make_root(folder)
        content = secret.read_bytes()
        key, root = load_pem_private_key(content, password=None), x509.load_pem_x509_certificate(content)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != root.public_key():
            raise _damaged(folder)
        if not (folder / ROOT_FILE).exists():
            _write(folder / ROOT_FILE, _pem(root), 0o644).replace(folder / ROOT_FILE)
    except OSError as error:
        raise UsageError(
            f"the software platform in {folder} cannot be read or made: {error.strerror}. Check the folder."
        ) from None
    except (ValueError, TypeError):
        raise _damaged(folder) from None
    return key, root


def _make_root(folder: Path) -> None:
    """Key and certificate in one file, which appears complete, and never in place of another."""
    key, start = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC) - _ROOT_HISTORY
    root = certificate(ROOT, key, ROOT, key, Span(start=start, end=start + timedelta(days=365 * _ROOT_YEARS)), depth=1)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    temporary = _write(folder / KEY_FILE, private + _pem(root), 0o600)
    try:
        os.link(temporary, folder / KEY_FILE)
    except FileExistsError:
        pass  # another program was quicker: its root is the one
    finally:
        temporary.unlink()


def _write(path: Path, content: bytes, mode: int) -> Path:
    """A complete file beside `path`, to be moved there."""
    temporary = path.with_name(f".{path.name}.{fresh_nonce().hex()[:16]}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # whatever the umask is
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    return temporary


def _damaged(folder: Path) -> UsageError:
    return UsageError(
        f"the software platform in {folder} is damaged. Remove {KEY_FILE} and {ROOT_FILE} there, and a new one is made."
    )


def _name(common: str) -> x509.Name:
    names = [(NameOID.COMMON_NAME, f"SIMULATED {common}"), (NameOID.ORGANIZATION_NAME, ORGANISATION)]
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in names])


def _pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(Encoding.PEM) for each in certificates)
