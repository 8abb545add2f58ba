"""Makes SGX and TDX evidence under a root of its own, right and wrong in ways that the software platform never is."""

import struct
from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives.asymmetric import ec

from darknight.trust.evidence import Evidence
from darknight.trust.policy import Policy
from darknight.trust.quote import SGX, TDX
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

NOW = 1_790_000_000
DATA = bytes(range(64))
SGX_MEASUREMENT, TD_MEASUREMENT = b"\x11" * 32, b"\x22" * 48
SIGNER = b"\x33" * 32
REGISTERS = tuple(bytes([number]) * 48 for number in range(4))


def span(start=-1, end=1):
    """In days from NOW."""
    now = datetime.fromtimestamp(NOW, UTC)
    return Span(start=now + timedelta(days=start), end=now + timedelta(days=end))


def body_of(format, **more):
    if format == SGX:
        return enclave_body(**{"measurement": SGX_MEASUREMENT, "signer": SIGNER, "report_data": DATA, **more})
    return td_body(**{"measurement": TD_MEASUREMENT, "registers": REGISTERS, "report_data": DATA, **more})


class Forger:
    """An authority in `folder`, which signs whatever it is told to."""

    def __init__(self, folder):
        self.authority = Authority(folder)
        self.quoting_key = ec.generate_private_key(ec.SECP256R1())

    def policy(self, **more):
        return Policy(insecure_simulated_root=self.authority.root_certificate, **more)

    def quote(self, format=SGX, *, signed=None, version=None, vendor=None, body=None, chain=None, **more):
        header = quote_header(
            version=version or {SGX: 3, TDX: 4}[format], format=format, **({"vendor": vendor} if vendor else {})
        )
        return signed_quote(
            signed or header + (body if body is not None else body_of(format)),
            **{
                "quoting_key": self.quoting_key,
                "processor_key": self.authority.processor_key,
                "chain": chain or self.authority.chain(span()),
                "product": qe_product(format),
                **more,
            },
        )

    def collateral(self, format=SGX, *, status="UpToDate", info=None, identity=None, dates=None, revoked=()):
        """info, identity: what is different in Intel's two statements, which are signed all the same."""
        dates = dates or span()
        times = {"format": format, "start": dates.start, "end": dates.end}
        return self.authority.collateral(
            tcb_info=as_signed({**tcb_info(status=status, **times), **(info or {})}),
            qe_identity=as_signed({**qe_identity(**times), **(identity or {})}),
            span=dates,
            revoked=revoked,
        )

    def evidence(self, format=SGX, **quote):
        return Evidence.of(self.quote(format, **quote), collateral=self.collateral(format))


def version_5(forger, kind, size, body, *, format=TDX):
    """A quote of version 5: the kind and size of its body stand before it."""
    return forger.quote(format, signed=quote_header(version=5, format=format) + struct.pack("<HI", kind, size) + body)
