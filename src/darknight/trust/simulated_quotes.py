"""The bytes of simulated evidence: Intel's formats, filled in by a program. See darknight.trust.simulation."""

from __future__ import annotations

import hashlib
import json
import struct
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from darknight.trust.quote import SGX

QE_SIGNER = hashlib.sha256(b"DarKnight SIMULATION: quoting enclave").digest()
FMSPC = bytes.fromhex("00906ed50000")
SGX_EXTENSIONS = x509.ObjectIdentifier("1.2.840.113741.1.13.1")

_QE_VENDOR = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
_QE_DATA = bytes(range(32))  # what Intel's quoting enclave writes beside its key
_ECDSA_P256, _TDX_TYPE = 2, 0x81
_PCE_SVN, _QE_SVN = 11, 1
_PCK_CHAIN, _QE_REPORT = 5, 6  # kinds of certification data
_INIT_AND_64_BIT, _DEBUG, _QE_ATTRIBUTES = 0x05, 0x02, 0x11
_SEPT_VE_DISABLE = 0x10000000
_ZEROS = [{"svn": 0}] * 16


def enclave_report(*, measurement: bytes, signer: bytes, product: int, svn: int, data: bytes, attributes: int) -> bytes:
    """An SGX report body of 384 bytes."""
    head = bytes(48) + struct.pack("<QQ", attributes, 3) + measurement + bytes(32) + signer + bytes(96)
    return head + struct.pack("<HH", product, svn) + bytes(60) + data.ljust(64, b"\0")


def sgx_body(*, measurement: bytes, signer: bytes, report_data: bytes, debug: bool) -> bytes:
    attributes = _INIT_AND_64_BIT | (_DEBUG if debug else 0)
    return enclave_report(
        measurement=measurement, signer=signer, product=0, svn=0, data=report_data, attributes=attributes
    )


def td_body(*, measurement: bytes, registers: tuple[bytes, ...], report_data: bytes, debug: bool) -> bytes:
    """A TD report 1.0 of 584 bytes."""
    attributes = struct.pack("<Q", _SEPT_VE_DISABLE | (1 if debug else 0))
    return bytes(120) + attributes + bytes(8) + measurement + bytes(144) + b"".join(registers) + report_data


def signed_quote(
    body: bytes,
    *,
    format: str,
    attestation_key: ec.EllipticCurvePrivateKey,
    pck_key: ec.EllipticCurvePrivateKey,
    chain: bytes,
) -> bytes:
    """A quote of version 3 (SGX) or 4 (TDX): the quoting enclave's key signs the body, the PCK that key."""
    sgx = format == SGX
    header = struct.pack("<HHIHH", 3 if sgx else 4, _ECDSA_P256, 0 if sgx else _TDX_TYPE, _QE_SVN, _PCE_SVN)
    signed = header + _QE_VENDOR + bytes(20) + body
    public = attestation_key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]
    report = enclave_report(
        measurement=hashlib.sha256(QE_SIGNER).digest(),
        signer=QE_SIGNER,
        product=_qe_product(format),
        svn=_QE_SVN,
        data=hashlib.sha256(public + _QE_DATA).digest(),
        attributes=_QE_ATTRIBUTES,
    )
    said = report + raw_signature(pck_key, report) + struct.pack("<H", len(_QE_DATA)) + _QE_DATA
    inner = said + struct.pack("<HI", _PCK_CHAIN, len(chain)) + chain
    wrapped = inner if sgx else struct.pack("<HI", _QE_REPORT, len(inner)) + inner
    signature = raw_signature(attestation_key, signed) + public + wrapped
    return signed + struct.pack("<I", len(signature)) + signature


def tcb_info(*, format: str, status: str, start: datetime, end: datetime) -> str:
    """Intel's statement about which TCB is good, as it would be for this platform."""
    tcb: dict[str, Any] = {"sgxtcbcomponents": _ZEROS, "pcesvn": _PCE_SVN}
    info: dict[str, Any] = {
        "id": "SGX" if format == SGX else "TDX",
        "version": 3,
        **_span(start, end),
        "fmspc": FMSPC.hex().upper(),
    }
    info |= {"pceId": "0000", "tcbType": 0, "tcbEvaluationDataNumber": 1}
    if format != SGX:
        tcb["tdxtcbcomponents"] = _ZEROS
        info["tdxModule"] = {"mrsigner": "00" * 48, "attributes": "00" * 8, "attributesMask": "FF" * 8}
    info["tcbLevels"] = [{"tcb": tcb, "tcbDate": _iso(start), "tcbStatus": status}]
    return json.dumps(info, separators=(",", ":"))


def qe_identity(*, format: str, start: datetime, end: datetime) -> str:
    """Intel's statement about which quoting enclave is good."""
    level = {"tcb": {"isvsvn": _QE_SVN}, "tcbDate": _iso(start), "tcbStatus": "UpToDate"}
    identity = {
        "id": "QE" if format == SGX else "TD_QE",
        "version": 2,
        **_span(start, end),
        "tcbEvaluationDataNumber": 1,
        "miscselect": "00000000",
        "miscselectMask": "FFFFFFFF",
        "attributes": f"{_QE_ATTRIBUTES:02X}" + "00" * 15,
        "attributesMask": "FB" + "FF" * 7 + "00" * 8,
        "mrsigner": QE_SIGNER.hex().upper(),
        "isvprodid": _qe_product(format),
        "tcbLevels": [level],
    }
    return json.dumps(identity, separators=(",", ":"))


def sgx_extension() -> bytes:
    """What Intel writes into a PCK certificate: PPID, TCB, PCE id, FMSPC, kind of SGX. All zeros but the FMSPC."""
    base = SGX_EXTENSIONS.dotted_string
    components = [_pair(f"{base}.2.{number}", _der(2, b"\0")) for number in range(1, 17)]
    tcb = b"".join(
        [*components, _pair(f"{base}.2.17", _der(2, bytes([_PCE_SVN]))), _pair(f"{base}.2.18", _der(4, bytes(16)))]
    )
    entries = [
        _pair(f"{base}.1", _der(4, bytes(16))),
        _pair(f"{base}.2", _der(0x30, tcb)),
        _pair(f"{base}.3", _der(4, bytes(2))),
        _pair(f"{base}.4", _der(4, FMSPC)),
        _pair(f"{base}.5", _der(10, b"\0")),
    ]
    return _der(0x30, b"".join(entries))


def raw_signature(key: ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    """ECDSA as r and s of 32 bytes each."""
    r, s = decode_dss_signature(key.sign(message, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def _qe_product(format: str) -> int:
    return 1 if format == SGX else 2


def _span(start: datetime, end: datetime) -> dict[str, str]:
    return {"issueDate": _iso(start), "nextUpdate": _iso(end)}


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _pair(number: str, value: bytes) -> bytes:
    return _der(0x30, _object_identifier(number) + value)


def _object_identifier(number: str) -> bytes:
    first, second, *rest = (int(part) for part in number.split("."))
    content = bytearray([40 * first + second])
    for part in rest:
        digits = [part & 0x7F]
        while part := part >> 7:
            digits.append(0x80 | part & 0x7F)
        content += bytes(reversed(digits))
    return _der(6, bytes(content))


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    length = (
        bytes([size]) if size < 0x80 else bytes([0x81, size]) if size < 0x100 else b"\x82" + size.to_bytes(2, "big")
    )
    return bytes([tag]) + length + content
