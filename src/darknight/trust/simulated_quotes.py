"""The bytes of simulated evidence: Intel's formats, filled in by a program. See darknight.trust.simulation."""

from __future__ import annotations

import hashlib
import json
import struct
from datetime import UTC, datetime
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from darknight.trust.quote import SGX

FMSPC = bytes.fromhex("00906ed50000")
QE_VENDOR = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
QE_SIGNER = hashlib.sha256(b"DarKnight SIMULATION: quoting enclave").digest()

_QE_DATA = bytes(range(32))  # what Intel's quoting enclave writes beside its key
_ECDSA_P256 = 2
_SGX_TYPE, _TDX_TYPE = 0x00, 0x81
_PCE_SVN, _QE_SVN = 11, 1
_PCK_CHAIN, _QE_REPORT = 5, 6  # kinds of certification data
_INIT_AND_64_BIT, _DEBUG, _QE_ATTRIBUTES = 0x05, 0x02, 0x11
_SEPT_VE_DISABLE, _TD_DEBUG = 1 << 28, 1
_EXTENSION = "1.2.840.113741.1.13.1"
_ZEROS = [{"svn": 0}] * 16


def quote_header(*, version: int, format: str, vendor: bytes = QE_VENDOR) -> bytes:
    tee_type = _SGX_TYPE if format == SGX else _TDX_TYPE
    return struct.pack("<HHIHH", version, _ECDSA_P256, tee_type, _QE_SVN, _PCE_SVN) + vendor + bytes(20)


def enclave_body(
    *, measurement: bytes, signer: bytes, product: int = 0, svn: int = 0, report_data: bytes, debug: bool = False
) -> bytes:
    """An SGX report of 384 bytes."""
    return _report(measurement, signer, product, svn, report_data, _INIT_AND_64_BIT | (_DEBUG if debug else 0))


def td_body(*, measurement: bytes, registers: tuple[bytes, ...], report_data: bytes, debug: bool = False) -> bytes:
    """A TD report 1.0 of 584 bytes."""
    attributes = struct.pack("<Q", _SEPT_VE_DISABLE | (_TD_DEBUG if debug else 0))
    return bytes(120) + attributes + bytes(8) + measurement + bytes(144) + b"".join(registers) + report_data


def signed_quote(
    signed: bytes,
    *,
    quoting_key: ec.EllipticCurvePrivateKey,
    processor_key: ec.EllipticCurvePrivateKey,
    chain: bytes,
    product: int,
) -> bytes:
    """Header and body with their signature: the quoting enclave's key signs them, the processor's (PCK) that key.

    product: of the quoting enclave; its number is another one for SGX than for TDX.
    """
    public = quoting_key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]
    bound = hashlib.sha256(public + _QE_DATA).digest().ljust(64, b"\0")
    report = _report(hashlib.sha256(QE_SIGNER).digest(), QE_SIGNER, product, _QE_SVN, bound, _QE_ATTRIBUTES)
    inner = report + raw_signature(processor_key, report) + struct.pack("<H", len(_QE_DATA)) + _QE_DATA
    inner += struct.pack("<HI", _PCK_CHAIN, len(chain)) + chain
    (version,) = struct.unpack_from("<H", signed)
    if version > 3:
        inner = struct.pack("<HI", _QE_REPORT, len(inner)) + inner
    signature = raw_signature(quoting_key, signed) + public + inner
    return signed + struct.pack("<I", len(signature)) + signature


def qe_product(format: str) -> int:
    return 1 if format == SGX else 2


def tcb_info(*, format: str, status: str, start: datetime, end: datetime) -> dict[str, Any]:
    """Intel's statement about which TCB is good, as it would be for this platform."""
    tcb: dict[str, Any] = {"sgxtcbcomponents": _ZEROS, "pcesvn": _PCE_SVN}
    info: dict[str, Any] = {
        "id": "SGX" if format == SGX else "TDX",
        "version": 3,
        **_span(start, end),
        "fmspc": FMSPC.hex().upper(),
        "pceId": "0000",
        "tcbType": 0,
        "tcbEvaluationDataNumber": 1,
        "tcbLevels": [{"tcb": tcb, "tcbDate": _iso(start), "tcbStatus": status}],
    }
    if format != SGX:
        tcb["tdxtcbcomponents"] = _ZEROS
        info["tdxModule"] = {"mrsigner": "00" * 48, "attributes": "00" * 8, "attributesMask": "FF" * 8}
    return info


def qe_identity(*, format: str, start: datetime, end: datetime) -> dict[str, Any]:
    """Intel's statement about which quoting enclave is good."""
    return {
        "id": "QE" if format == SGX else "TD_QE",
        "version": 2,
        **_span(start, end),
        "tcbEvaluationDataNumber": 1,
        "miscselect": "00000000",
        "miscselectMask": "FFFFFFFF",
        "attributes": f"{_QE_ATTRIBUTES:02X}" + "00" * 15,
        "attributesMask": "FB" + "FF" * 7 + "00" * 8,
        "mrsigner": QE_SIGNER.hex().upper(),
        "isvprodid": qe_product(format),
        "tcbLevels": [{"tcb": {"isvsvn": _QE_SVN}, "tcbDate": _iso(start), "tcbStatus": "UpToDate"}],
    }


def as_signed(statement: dict[str, Any]) -> str:
    """A statement as the text that is signed."""
    return json.dumps(statement, separators=(",", ":"))


def sgx_extension() -> bytes:
    """What Intel writes into a PCK certificate: PPID, TCB, PCE id, FMSPC, kind of SGX. All zeros but the FMSPC."""
    parts = [_pair(f"2.{number}", _der(2, b"\0")) for number in range(1, 17)]
    tcb = b"".join([*parts, _pair("2.17", _der(2, bytes([_PCE_SVN]))), _pair("2.18", _der(4, bytes(16)))])
    entries = {"1": _der(4, bytes(16)), "2": _der(0x30, tcb), "3": _der(4, bytes(2))}
    entries |= {"4": _der(4, FMSPC), "5": _der(10, b"\0")}
    return _der(0x30, b"".join(_pair(number, value) for number, value in entries.items()))


def raw_signature(key: ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    """ECDSA as r and s of 32 bytes each."""
    r, s = decode_dss_signature(key.sign(message, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def _report(measurement: bytes, signer: bytes, product: int, svn: int, data: bytes, attributes: int) -> bytes:
    head = bytes(48) + struct.pack("<QQ", attributes, 3) + measurement + bytes(32) + signer + bytes(96)
    return head + struct.pack("<HH", product, svn) + bytes(60) + data


def _span(start: datetime, end: datetime) -> dict[str, str]:
    return {"issueDate": _iso(start), "nextUpdate": _iso(end)}


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _pair(number: str, value: bytes) -> bytes:
    return _der(0x30, _object_identifier(f"{_EXTENSION}.{number}") + value)


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
    """Up to 65,535 bytes with their tag and length."""
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    return bytes([tag, 0x82]) + size.to_bytes(2, "big") + content if size > 0xFF else bytes([tag, 0x81, size]) + content
