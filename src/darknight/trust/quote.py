"""What a quote says of itself, read byte by byte. Nothing here is trusted: darknight.trust.verify does that.

    SGX   quote version 3
    TDX   quote version 4, or 5 with a TD report 1.0 or 1.5
    SNP   attestation report version 2 to 5, 1184 bytes

Intel's quotes carry their own length. Some hosts pad them with zeros, which are cut off; any other byte behind a quote
is refused, so a quote has one form and `Facts.size` says where it ends.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

from darknight.errors import TrustError

SGX, TDX, SNP = "sgx", "tdx", "snp"
FORMATS = (SGX, TDX, SNP)
REPORT_DATA_BYTES = 64
MAX_QUOTE_BYTES = 1 << 16

HEADER_BYTES = 48
SNP_REPORT_BYTES = 0x4A0
SNP_SIGNED_BYTES = 0x2A0

_V5_DESCRIPTION_BYTES = 6
_ECDSA_P256 = 2
_QE_REPORT_TYPE = 6
_SIGNATURE_AND_KEY_BYTES, _QE_REPORT_BYTES = 64 + 64, 384 + 64  # the second, a report and its signature, vouches
_SGX_TYPE, _TDX_TYPE = 0x00, 0x81
_SGX_BODY_BYTES, _TD10_BODY_BYTES, _TD15_BODY_BYTES = 384, 584, 648
_V5_BODIES = {2: _TD10_BODY_BYTES, 3: _TD15_BODY_BYTES}  # by the type that version 5 writes before its body
_INTEL_VERSIONS = {3: _SGX_TYPE, 4: _TDX_TYPE, 5: _TDX_TYPE}
_SNP_VERSIONS = (2, 3, 4, 5)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a quote claims.

    measurement: MRENCLAVE, MRTD, or the launch digest of SNP. registers: RTMR0 to RTMR3 of a TD. signer: MRSIGNER, or
    the digest of SNP's id key (zeros where there is none); None for a TD. product, svn: ISVPRODID and ISVSVN; an SNP
    guest has the second alone. privilege: the VMPL of an SNP guest. chip: the chip id in an SNP report; Intel's comes
    from certificates. body: where the signed body lies in the quote. size: of the quote without padding.
    """

    format: str
    version: int
    measurement: bytes
    registers: tuple[bytes, ...] = ()
    signer: bytes | None
    product: int | None
    svn: int | None
    report_data: bytes
    debug: bool
    privilege: int | None = None
    chip: bytes | None = None
    body: range
    size: int


def read_quote(raw: bytes) -> Facts:
    """Raises TrustError (check "format") on anything that is not exactly one quote that we know."""
    if len(raw) > MAX_QUOTE_BYTES:
        refuse(f"{len(raw):,} bytes; a quote has at most {MAX_QUOTE_BYTES:,}.")
    if len(raw) < HEADER_BYTES:
        refuse(f"{len(raw)} bytes are too few for a quote.")
    version, key_type, tee_type = struct.unpack_from("<HHI", raw)
    if version in _INTEL_VERSIONS and key_type == _ECDSA_P256:
        return _intel(raw, version, tee_type)
    if struct.unpack_from("<I", raw)[0] in _SNP_VERSIONS:
        return _snp(raw)
    refuse(
        "it is neither an SGX or TDX quote of version 3 to 5 nor an SNP report of version 2 to 5. "
        "Give the bytes as the platform produced them."
    )


def _intel(raw: bytes, version: int, tee_type: int) -> Facts:
    if tee_type != _INTEL_VERSIONS[version]:
        refuse(f"a quote of version {version} for a TEE of type {tee_type:#x}, which do not go together.")
    start, size = HEADER_BYTES, _SGX_BODY_BYTES if version == 3 else _TD10_BODY_BYTES
    if version == 5:
        start += _V5_DESCRIPTION_BYTES
        kind, stated = _number(raw, HEADER_BYTES, 2), _number(raw, HEADER_BYTES + 2, 4)
        size = _V5_BODIES.get(kind, -1)
        if stated != size:
            refuse(f"its body is of type {kind} and has {stated} bytes; known are type 2 of 584 and type 3 of 648.")
    end = _end(raw, start + size, nested=version > 3)
    read = _sgx_facts if version == 3 else _tdx_facts
    return read(raw[start : start + size], version, range(start, start + size), end)


def _end(raw: bytes, body_end: int, *, nested: bool) -> int:
    """Where the quote ends by its own word, which its parts must confirm; only zeros may follow."""
    end = body_end + 4 + _number(raw, body_end, 4)
    if len(raw) < end:
        refuse(f"it is cut off after {len(raw)} of {end} bytes.")
    if any(raw[end:]):
        refuse(f"something follows behind its {end} bytes. Give the quote alone.")
    at = body_end + 4 + _SIGNATURE_AND_KEY_BYTES
    if nested:  # from version 4 on, what vouches for the key is wrapped once more
        if _number(raw, at, 2) != _QE_REPORT_TYPE:
            refuse("nothing in it vouches for its key.")
        if at + 6 + _number(raw, at + 2, 4) != end:
            refuse("its parts do not add up to its length.")
        at += 6
    at += _QE_REPORT_BYTES
    at += 2 + _number(raw, at, 2)
    if at + 6 + _number(raw, at + 2, 4) != end:
        refuse("its parts do not add up to its length.")
    return end


def _number(raw: bytes, at: int, size: int) -> int:
    if len(raw) < at + size:
        refuse(f"it is cut off after {len(raw)} bytes.")
    return int.from_bytes(raw[at : at + size], "little")


def _sgx_facts(body: bytes, version: int, where: range, size: int) -> Facts:
    product, svn = struct.unpack_from("<HH", body, 256)
    return Facts(
        format=SGX,
        version=version,
        measurement=body[64:96],
        signer=body[128:160],
        product=product,
        svn=svn,
        report_data=body[320:384],
        debug=bool(body[48] & 2),
        body=where,
        size=size,
    )


def _tdx_facts(body: bytes, version: int, where: range, size: int) -> Facts:
    return Facts(
        format=TDX,
        version=version,
        measurement=body[136:184],
        registers=tuple(body[at : at + 48] for at in (328, 376, 424, 472)),
        signer=None,
        product=None,
        svn=None,
        report_data=body[520:584],
        debug=body[120] != 0,
        body=where,
        size=size,
    )


def _snp(raw: bytes) -> Facts:
    if len(raw) != SNP_REPORT_BYTES:
        refuse(f"{len(raw)} bytes; an SNP report has exactly {SNP_REPORT_BYTES}.")
    version, svn, policy = struct.unpack_from("<IIQ", raw)
    return Facts(
        format=SNP,
        version=version,
        measurement=raw[0x90:0xC0],
        signer=raw[0xE0:0x110],
        product=None,
        svn=svn,
        report_data=raw[0x50:0x90],
        debug=bool(policy >> 19 & 1),
        privilege=struct.unpack_from("<I", raw, 0x30)[0],
        chip=raw[0x1A0:0x1E0],
        body=range(SNP_SIGNED_BYTES),
        size=len(raw),
    )


def refuse(words: str) -> NoReturn:
    raise TrustError(f"the quote cannot be read: {words}", check="format")
