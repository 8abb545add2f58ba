"""A platform in software, for machines without a TEE: genuine formats under a root of its own. It protects nothing.

Everything but the root is as on real hardware, so the same verifier judges it. Whoever trusts its root trusts a key in
a file. A client has to say so: `insecure_simulated_root` in its policy, and every place that shows the result says
SIMULATED.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID
from dcap_qvl import QuoteCollateralV3

from darknight.errors import UsageError
from darknight.trust.evidence import Evidence
from darknight.trust.quote import REPORT_DATA_BYTES, SGX, TDX
from darknight.trust.simulated_quotes import (
    SGX_EXTENSIONS,
    qe_identity,
    raw_signature,
    sgx_body,
    sgx_extension,
    signed_quote,
    tcb_info,
    td_body,
)

KEY_FILE = "simulated-root-key.pem"
ROOT_FILE = "simulated-root.pem"
SIMULATED_SIGNER = hashlib.sha256(b"DarKnight SIMULATION: signer").digest()
SIMULATED_REGISTERS = (bytes(48),) * 4

_ROOT_YEARS, _DAYS = 10, 30
_MEASURED = (".py", ".so")
_ROOT, _PROCESSOR, _PCK, _SIGNING = "SGX Root CA", "SGX PCK Processor CA", "SGX PCK Certificate", "SGX TCB Signing"


def simulated_measurement(format: str = SGX) -> bytes:
    """What the loader of an enclave would have measured: names and contents of the package's own files."""
    digest = hashlib.sha256() if format == SGX else hashlib.sha384()
    package = Path(__file__).resolve().parents[1]
    for path in sorted(path for path in package.rglob("*") if path.suffix in _MEASURED):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


@dataclass(frozen=True, kw_only=True)
class Pretence:
    """What the software platform claims. The defaults are an honest enclave of this package.

    format: "sgx" or "tdx". measurement: that of this package if None. status: the TCB status in its collateral.
    days: how long certificates and collateral are valid from now on; negative for some that have expired.
    """

    format: str = SGX
    measurement: bytes | None = None
    signer: bytes = SIMULATED_SIGNER
    debug: bool = False
    status: str = "UpToDate"
    days: float = _DAYS

    def __post_init__(self) -> None:
        if self.format not in (SGX, TDX):
            raise UsageError(f"the software platform has no format {self.format!r}; use {SGX} or {TDX}.")


class SoftwarePlatform:
    """Issues evidence for whoever asks. The root's key lives in `folder` and outlives the program, as silicon does.

    Guarantees: evidence of a software platform is accepted only where its root was given under a name that begins with
    insecure_, and is then called simulated (contract test: tests/trust/test_simulation.py).
    """

    name = "simulation"
    simulated = True

    def __init__(self, folder: Path, *, pretence: Pretence | None = None) -> None:
        self._pretence = pretence if pretence is not None else Pretence()
        self._root_key, self._root = _root_in(folder)
        self._measurement = self._pretence.measurement
        if self._measurement is None:
            self._measurement = simulated_measurement(self._pretence.format)
        self._keys = {name: _new_key() for name in (_PROCESSOR, _PCK, _SIGNING)}
        self._attestation_key = _new_key()

    @property
    def root_certificate(self) -> bytes:
        """PEM: what a client may trust as insecure_simulated_root."""
        return self._root.public_bytes(Encoding.PEM)

    @property
    def measurement(self) -> bytes:
        assert self._measurement is not None
        return self._measurement

    def evidence(self, report_data: bytes) -> Evidence:
        """A quote over these 64 bytes, with collateral made at this moment."""
        if len(report_data) != REPORT_DATA_BYTES:
            raise UsageError(f"report data of {len(report_data)} bytes; needs {REPORT_DATA_BYTES}.")
        wanted = self._pretence
        end = datetime.fromtimestamp(int(time.time()), UTC) + timedelta(days=wanted.days)
        start = end - timedelta(days=abs(wanted.days) + 1)
        processor = self._certificate(_PROCESSOR, start, end, authority=True)
        pck = self._certificate(_PCK, start, end, issuer=_PROCESSOR)
        if wanted.format == SGX:
            body = sgx_body(
                measurement=self.measurement, signer=wanted.signer, report_data=report_data, debug=wanted.debug
            )
        else:
            body = td_body(
                measurement=self.measurement,
                registers=SIMULATED_REGISTERS,
                report_data=report_data,
                debug=wanted.debug,
            )
        quote = signed_quote(
            body,
            format=wanted.format,
            attestation_key=self._attestation_key,
            pck_key=self._keys[_PCK],
            chain=_pem(pck, processor, self._root),
        )
        return Evidence.of(quote, collateral=self._collateral(processor, start, end))

    def _collateral(self, processor: x509.Certificate, start: datetime, end: datetime) -> bytes:
        signing = self._certificate(_SIGNING, start, end)
        info = tcb_info(format=self._pretence.format, status=self._pretence.status, start=start, end=end)
        identity = qe_identity(format=self._pretence.format, start=start, end=end)
        issuers = _pem(signing, self._root).decode()
        key = self._keys[_SIGNING]
        collateral = QuoteCollateralV3(
            pck_crl_issuer_chain=_pem(processor, self._root).decode(),
            root_ca_crl=_empty_list(_ROOT, self._root_key, start, end),
            pck_crl=_empty_list(_PROCESSOR, self._keys[_PROCESSOR], start, end),
            tcb_info_issuer_chain=issuers,
            tcb_info=info,
            tcb_info_signature=raw_signature(key, info.encode()),
            qe_identity_issuer_chain=issuers,
            qe_identity=identity,
            qe_identity_signature=raw_signature(key, identity.encode()),
        ).to_json()
        return str(collateral).encode()

    def _certificate(
        self, name: str, start: datetime, end: datetime, *, issuer: str = _ROOT, authority: bool = False
    ) -> x509.Certificate:
        signer = self._root_key if issuer == _ROOT else self._keys[issuer]
        return _certificate(name, self._keys[name], issuer, signer, start, end, depth=0 if authority else None)


def _root_in(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The root of this folder; made there first if there is none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / KEY_FILE).exists():
            _make_root(folder)
        key = load_pem_private_key((folder / KEY_FILE).read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate((folder / ROOT_FILE).read_bytes())
    except OSError as error:
        raise UsageError(
            f"the software platform in {folder} cannot be read or made: {error.strerror}. Check the folder."
        ) from None
    except ValueError:
        raise UsageError(
            f"the software platform in {folder} is damaged. Remove {KEY_FILE} and {ROOT_FILE}, and a new one is made."
        ) from None
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key, certificate


def _make_root(folder: Path) -> None:
    key, start = _new_key(), datetime.now(UTC) - timedelta(days=2 * _DAYS)
    certificate = _certificate(_ROOT, key, _ROOT, key, start, start + timedelta(days=365 * _ROOT_YEARS), depth=1)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for name, content, mode in ((ROOT_FILE, _pem(certificate), 0o644), (KEY_FILE, private, 0o600)):
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    start: datetime,
    end: datetime,
    *,
    depth: int | None,
) -> x509.Certificate:
    """depth: how many authorities may follow; None for a certificate that signs no other."""
    authority = depth is not None
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=depth), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **usage),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if name == _PCK:
        builder = builder.add_extension(x509.UnrecognizedExtension(SGX_EXTENSIONS, sgx_extension()), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _empty_list(issuer: str, key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime) -> bytes:
    """A revocation list that revokes nothing."""
    return (
        x509.CertificateRevocationListBuilder()
        .issuer_name(_name(issuer))
        .last_update(start)
        .next_update(end)
        .add_extension(x509.CRLNumber(1), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.DER)
    )


def _name(common: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, f"SIMULATED {common}"),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "DarKnight SIMULATION, not Intel"),
        ]
    )


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)
