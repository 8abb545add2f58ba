"""Makes SEV-SNP reports and their certificates under a root of its own, right and wrong in every way."""

import struct
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

NOW = 1_760_000_000
CHIP = bytes(range(1, 65))
AMD = "1.3.6.1.4.1.3704.1"
PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA384()), salt_length=48)
# bootloader, TEE, reserved, SNP, microcode; one number needs two bytes as a DER integer.
TCB = bytes((3, 1, 0, 0, 0, 0, 8, 209))
TURIN_TCB = bytes((1, 3, 1, 8, 0, 0, 0, 209))


@cache
def rsa_key(name):
    """AMD's keys have 4096 bits; half of that is made in a tenth of the time."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@cache
def leaf_key(name="leaf"):
    return ec.generate_private_key(ec.SECP384R1())


def at(days=0):
    return datetime.fromtimestamp(NOW, UTC) + timedelta(days=days)


def name_of(common):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def der(*certificates):
    return tuple(each.public_bytes(Encoding.DER) for each in certificates)


def integer(value):
    return bytes((2, 1, value)) if value < 0x80 else bytes((2, 2, 0, value))


@dataclass(frozen=True, kw_only=True)
class Foundry:
    """A vendor. Each field is a way to do it right; `replace` makes it wrong."""

    product: str = "Milan"
    vlek: bool = False
    tcb: bytes | None = None
    hardware_id: bytes | None = None
    wrapped_id: bool = False
    days: tuple[int, int] = (-10, 10)
    root_key: str = "ark"
    root_days: tuple[int, int] = (-100, 100)
    root_signer: str | None = None
    middle_key: str = "ask"
    middle_signer: str = "ark"
    middle_days: tuple[int, int] = (-100, 100)
    middle_ca: bool = True
    middle_serial: int = 65537
    leaf_signer: str = "ask"
    leaf_key: object = None
    leaf_more: tuple = ()
    leaf_values: dict = field(default_factory=dict)

    def with_(self, **changes):
        return replace(self, **changes)

    @property
    def stated_tcb(self):
        return self.tcb if self.tcb is not None else TURIN_TCB if self.product == "Turin" else TCB

    @property
    def chip(self):
        """As a report has it: 64 bytes, of which Turin uses eight."""
        if self.hardware_id is not None:
            return self.hardware_id.ljust(64, b"\0")
        return CHIP[:8].ljust(64, b"\0") if self.product == "Turin" else CHIP

    @property
    def root(self):
        more = [(x509.BasicConstraints(ca=True, path_length=None), True), (usage(certs=True), True)]
        names = f"ARK-{self.product}", f"ARK-{self.product}"
        key = rsa_key(self.root_key)
        signer = rsa_key(self.root_signer or self.root_key)
        return make(*names, key.public_key(), signer, self.root_days, more, serial=65536)

    @property
    def middle(self):
        more = [(x509.BasicConstraints(ca=self.middle_ca, path_length=0 if self.middle_ca else None), True)]
        more.append((usage(certs=True), True))
        key = rsa_key(self.middle_key)
        names = self.middle_name, f"ARK-{self.product}"
        return make(*names, key.public_key(), rsa_key(self.middle_signer), self.middle_days, more, self.middle_serial)

    @property
    def middle_name(self):
        return f"SEV-VLEK-{self.product}" if self.vlek else f"SEV-{self.product}"

    @property
    def leaf(self):
        key = self.leaf_key or leaf_key()
        more = [
            (x509.UnrecognizedExtension(x509.ObjectIdentifier(f"{AMD}.{number}"), value), False)
            for number, value in {**self._values(), **self.leaf_values}.items()
            if value is not None
        ]
        names = "SEV-VLEK" if self.vlek else "SEV-VCEK", self.middle_name
        return make(*names, key.public_key(), rsa_key(self.leaf_signer), self.days, [*more, *self.leaf_more], serial=1)

    def _values(self):
        tcb = self.stated_tcb
        if self.product == "Turin":
            numbers = ("3.9", "3.1", "3.2", "3.3", "3.5", "3.6", "3.7", "3.8")
        else:
            numbers = ("3.1", "3.2", "3.4", "3.5", "3.6", "3.7", "3.3", "3.8")
        found = {number: integer(value) for number, value in zip(numbers, tcb, strict=True)}
        if self.vlek:
            return {**found, "5": b"\x16\x05cloud"}
        chip = self.chip[:8] if self.product == "Turin" else self.chip
        return {**found, "4": bytes((4, len(chip))) + chip if self.wrapped_id else chip}

    @property
    def chain(self):
        return der(self.leaf, self.middle, self.root)

    def crl(self, *, revoked=(), signer=None, days=(-1, 1), issuer=None, critical=False):
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(name_of(issuer or f"ARK-{self.product}"))
            .last_update(at(days[0]))
            .next_update(at(days[1]))
        )
        if critical:
            where = x509.IssuingDistributionPoint(
                full_name=None,
                relative_name=None,
                only_contains_user_certs=True,
                only_contains_ca_certs=False,
                only_some_reasons=None,
                indirect_crl=False,
                only_contains_attribute_certs=False,
            )
            builder = builder.add_extension(where, critical=True)
        for number in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(at(-2)).build()
            builder = builder.add_revoked_certificate(entry)
        signed = builder.sign(rsa_key(signer or self.root_key), hashes.SHA384(), rsa_padding=PSS)
        return signed.public_bytes(Encoding.DER)

    def report(
        self,
        *,
        version=3,
        svn=4,
        policy=0x30000,
        vmpl=0,
        algorithm=1,
        signing_key=None,
        report_data=bytes(64),
        measurement=b"\x11" * 48,
        id_key=bytes(48),
        tcb=None,
        chip=None,
        key=None,
        tail=b"",
    ):
        """1184 bytes, signed by the leaf's key."""
        kind = (1 if self.vlek else 0) if signing_key is None else signing_key
        body = bytearray(0x2A0)
        struct.pack_into("<IIQ", body, 0, version, svn, policy)
        struct.pack_into("<II", body, 0x30, vmpl, algorithm)
        struct.pack_into("<I", body, 0x48, kind << 2)
        for where, value in (
            (0x50, report_data),
            (0x90, measurement),
            (0xE0, id_key),
            (0x180, self.stated_tcb if tcb is None else tcb),
            (0x1A0, self.chip if chip is None else chip),
        ):
            body[where : where + len(value)] = value
        signer = key or self.leaf_key or leaf_key()
        r, s = decode_dss_signature(signer.sign(bytes(body), ec.ECDSA(hashes.SHA384())))
        return (bytes(body) + r.to_bytes(72, "little") + s.to_bytes(72, "little") + tail).ljust(0x4A0, b"\0")


def usage(*, certs):
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    more = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not certs, key_cert_sign=certs, crl_sign=certs, **more)


def make(subject, issuer, public_key, signer, days, more, serial):
    builder = (
        x509.CertificateBuilder()
        .subject_name(name_of(subject))
        .issuer_name(name_of(issuer))
        .public_key(public_key)
        .serial_number(serial)
        .not_valid_before(at(days[0]))
        .not_valid_after(at(days[1]))
    )
    for value, critical in more:
        builder = builder.add_extension(value, critical=critical)
    return builder.sign(signer, hashes.SHA384(), rsa_padding=PSS)
