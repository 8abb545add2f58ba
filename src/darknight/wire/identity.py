"""Keys and certificates: who is at the other end of a link.

Each worker and each enclave has one ECDSA P-256 key and a certificate that it signed itself. Nobody vouches for
anybody: an enclave knows each worker's certificate from the fleet file, and a worker knows the certificates that it
serves. A certificate is public; send it by any means, and compare fingerprints by another.

Guarantees: a key file is created with mode 0600 before anything is in it, is never overwritten, and is refused when
other accounts can read it. An Identity shows its key in no repr and no pickle. Contract tests:
tests/wire/test_identity.py.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from darknight.errors import UsageError
from darknight.types import Secret

WORKER = "darknight-worker"
ENCLAVE = "darknight-enclave"

KEY_FILE = "key.pem"
CERTIFICATE_FILE = "certificate.pem"

_YEARS = 30  # a pinned certificate is taken back by removing it from the fleet file, not by its date
_LIMIT = 1 << 16
_PATIENCE = 5.0  # seconds for another program to finish making its identity


@dataclass(frozen=True, repr=False, eq=False)
class Identity(Secret):
    """A private key and the certificate of its public half, both PEM."""

    key: bytes
    certificate: bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.certificate)

    @classmethod
    def create(cls, name: str) -> Identity:
        """A new key, and a certificate for it under `name` (WORKER or ENCLAVE)."""
        key = ec.generate_private_key(ec.SECP256R1())
        number = x509.random_serial_number()
        # The number stands in the subject too: among several roots TLS finds one by its subject, and takes the first.
        names = [(NameOID.COMMON_NAME, name), (NameOID.SERIAL_NUMBER, f"{number:x}")]
        subject = x509.Name([x509.NameAttribute(kind, value) for kind, value in names])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(number)
            .not_valid_before(now - timedelta(days=1))  # clocks differ
            .not_valid_after(now + timedelta(days=365 * _YEARS))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return cls(private, certificate.public_bytes(Encoding.PEM))

    @classmethod
    def load_or_create(cls, folder: Path, name: str) -> Identity:
        """What `folder` holds; made there first if there is nothing. Raises UsageError on anything in between.

        Several programs may do so at once: one makes the identity, and the others wait for it.
        """
        key_path, certificate_path = folder / KEY_FILE, folder / CERTIFICATE_FILE
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone(folder):
                there = [path for path in (key_path, certificate_path) if path.exists() or path.is_symlink()]
                if not there:
                    return _create(folder, name)
                if len(there) == 2:
                    return _load(key_path, certificate_path)
        except OSError as error:
            raise UsageError(
                f"the identity in {folder} cannot be read or made: {error.strerror}. Check the folder."
            ) from None
        missing = certificate_path if there == [key_path] else key_path
        raise UsageError(
            f"{there[0]} is there but {missing.name} is not. Put {missing.name} back, or remove {there[0].name} "
            "too and a new identity is made; then give the new certificate to the other side."
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One program at a time, where the file system has locks; the kernel releases the lock of one that dies."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # a folder that may be searched but not listed; files are still created with O_EXCL
        yield
        return
    try:
        deadline = time.monotonic() + _PATIENCE
        while not lock_alone(descriptor) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def lock_alone(descriptor: int) -> bool:
    """False if another program holds the lock of this file. It goes with the descriptor, and with the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can hold one
        pass
    return True


def _create(folder: Path, name: str) -> Identity:
    """Both files, or neither. O_EXCL: what appeared meanwhile is another program's, and stays."""
    identity = Identity.create(name)
    made: list[Path] = []
    try:
        for path, content, mode in (
            (folder / KEY_FILE, identity.key, 0o600),
            (folder / CERTIFICATE_FILE, identity.certificate, 0o644),
        ):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            made.append(path)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)  # whatever the umask is
                file.write(content)
                file.flush()
                os.fsync(descriptor)
    except BaseException as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise UsageError(
                f"{folder}: another program makes an identity there at this moment. Start again when it is done."
            ) from None
        raise
    return identity


def _load(key_path: Path, certificate_path: Path) -> Identity:
    descriptor = os.open(key_path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of that name must not hold us up
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{key_path} is not an ordinary file. Put the key's file there.")
        if found.st_mode & 0o077:
            raise UsageError(
                f"{key_path} can be read by other accounts of this machine (mode {stat.S_IMODE(found.st_mode):04o}). "
                f"If nobody did, run: chmod 600 {key_path}. Otherwise remove both files and a new identity is made."
            )
        pem = file.read(_LIMIT)
    certificate = read_certificate(certificate_path)
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):  # damaged, or locked with a password
        raise UsageError(
            f"{key_path} is not a private key in PEM form without a password. "
            "Put the right file back, or remove both files and a new identity is made."
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise UsageError(f"{key_path} holds another kind of key; needs ECDSA on the curve P-256. Remove both files.")
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if x509.load_pem_x509_certificate(certificate).public_key().public_bytes(*form) != key.public_key().public_bytes(
        *form
    ):
        raise UsageError(
            f"{certificate_path} does not belong to {key_path.name} beside it. "
            "Put the right pair back, or remove both files and a new identity is made."
        )
    return Identity(pem, certificate)


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate (PEM), as people compare it: "SHA256:ab:cd:...". Raises UsageError if it is none."""
    digest = _parsed(certificate, "this certificate").fingerprint(hashes.SHA256())
    return "SHA256:" + digest.hex(":")


def read_certificate(path: Path) -> bytes:
    """The certificate in a file, as PEM; the file holds exactly one and nothing else."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            content = file.read(_LIMIT)
    except OSError as error:
        raise UsageError(f"the certificate {path} cannot be read: {error.strerror}. Check the path.") from None
    return checked_certificate(content, str(path))


def checked_certificate(content: bytes, where: str) -> bytes:
    """`content` in a canonical form, when it is exactly one PEM certificate; `where` it was found, for the error."""
    if b"PRIVATE KEY" in content:
        raise UsageError(
            f"{where} holds a private key; a certificate is needed ({CERTIFICATE_FILE}, not {KEY_FILE}). "
            "If the key has left its machine, make a new identity."
        )
    found = _parsed(content, where)
    if content.count(b"-----BEGIN") != 1:
        raise UsageError(f"{where} holds {content.count(b'-----BEGIN')} certificates; needs exactly one.")
    return found.public_bytes(Encoding.PEM)


def _parsed(content: bytes, where: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise UsageError(
            f"{where} is not a certificate in PEM form. It begins with -----BEGIN CERTIFICATE-----; "
            "a worker prints where its own is, and `darknight fleet identity` makes the enclave's."
        ) from None
