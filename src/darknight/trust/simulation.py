"""A platform in software, for machines without a TEE: genuine formats under a root of its own. It protects nothing.

Everything but the root is as on real hardware, so the same verifier judges it. Whoever trusts its root trusts a key in
a file. A client has to say so (`insecure_simulated_root` in its policy), and what shows the result says SIMULATED.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from darknight.errors import UsageError
from darknight.trust.evidence import Evidence
from darknight.trust.quote import REPORT_DATA_BYTES, SGX, TDX
from darknight.trust.simulated_authority import Authority, Span
from darknight.trust.simulated_quotes import (
    as_signed,
    enclave_body,
    qe_identity,
    qe_product,
    quote_header,
    signed_quote,
    tcb_info,
    td_body,
)

SIMULATED_SIGNER = hashlib.sha256(b"DarKnight SIMULATION: signer").digest()
SIMULATED_REGISTERS = (bytes(48),) * 4  # RTMR0 to RTMR3: a program measures nothing while it runs

_DAYS = 30
_MEASURED = (".py", ".so")
_VERSIONS = {SGX: 3, TDX: 4}


def simulated_measurement(format: str = SGX) -> bytes:
    """What a loader would have measured: names and contents of the package's own files. 32 bytes (sgx) or 48 (tdx)."""
    _known(format)
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
    svn: int = 0
    debug: bool = False
    status: str = "UpToDate"
    days: float = _DAYS

    def __post_init__(self) -> None:
        _known(self.format)


class SoftwarePlatform:
    """Issues evidence for whoever asks. The root's key lives in `folder` and outlives the program, as silicon does.

    Guarantees: evidence of a software platform is accepted only where its root was given under a name that begins with
    insecure_, and is then called simulated (contract test: tests/trust/test_simulation.py).
    Assumes: nothing; it protects nothing.
    """

    name = "simulation"
    simulated = True

    def __init__(self, folder: Path, *, pretence: Pretence | None = None) -> None:
        self._pretence = pretence if pretence is not None else Pretence()
        claimed = self._pretence.measurement
        self._measurement = claimed if claimed is not None else simulated_measurement(self._pretence.format)
        self._authority = Authority(folder)
        self._quoting_key = ec.generate_private_key(ec.SECP256R1())

    @property
    def root_certificate(self) -> bytes:
        """PEM: what a client may trust as insecure_simulated_root."""
        return self._authority.root_certificate

    @property
    def measurement(self) -> bytes:
        return self._measurement

    def evidence(self, report_data: bytes) -> Evidence:
        """A quote over these 64 bytes, with collateral that is made at this moment."""
        if len(report_data) != REPORT_DATA_BYTES:
            raise UsageError(f"report data of {len(report_data)} bytes; needs {REPORT_DATA_BYTES}.")
        format, span = self._pretence.format, self._span()
        quote = signed_quote(
            quote_header(version=_VERSIONS[format], format=format) + self._body(report_data),
            quoting_key=self._quoting_key,
            processor_key=self._authority.processor_key,
            chain=self._authority.chain(span),
            product=qe_product(format),
        )
        info = tcb_info(format=format, status=self._pretence.status, start=span.start, end=span.end)
        identity = qe_identity(format=format, start=span.start, end=span.end)
        collateral = self._authority.collateral(tcb_info=as_signed(info), qe_identity=as_signed(identity), span=span)
        return Evidence.of(quote, collateral=collateral)

    def _body(self, report_data: bytes) -> bytes:
        claimed = self._pretence
        if claimed.format == TDX:
            registers = SIMULATED_REGISTERS
            return td_body(
                measurement=self._measurement, registers=registers, report_data=report_data, debug=claimed.debug
            )
        return enclave_body(
            measurement=self._measurement,
            signer=claimed.signer,
            svn=claimed.svn,
            report_data=report_data,
            debug=claimed.debug,
        )

    def _span(self) -> Span:
        """It began an hour before it is needed: clocks differ."""
        now, days = datetime.fromtimestamp(int(time.time()), UTC), timedelta(days=self._pretence.days)
        return Span(start=min(now, now + days) - timedelta(hours=1), end=now + days)


def _known(format: str) -> None:
    if format not in _VERSIONS:
        raise UsageError(f"the software platform has no format {format!r}; use {' or '.join(_VERSIONS)}.")
