"""Attested key release: data keys go to an enclave that proved, a moment ago, what it is.

1. The client draws a nonce and sends it.
2. The enclave answers with its key, its configuration, and evidence whose report data is a digest of the nonce, the
   key, the certificate of this very connection, and the configuration.
3. The client checks the evidence on its own clock (darknight.trust.verify), computes the digest itself, and compares.
4. It encrypts the keys to the enclave's key. The encryption is bound to everything said so far, to the job, to the
   sealed data, to the checkpoint that the job goes on from, and to the client's own key. It signs what it sends.
5. The enclave opens it once: a nonce releases keys one single time.

Guarantees: keys reach only the enclave whose evidence was checked, for this job, these data and this checkpoint; what
    is recorded and sent again, or sent to another enclave, opens nowhere. Contract tests:
    tests/trust/test_release.py, tests/service/test_protocol_attacks.py.
Assumes: that the platform's vendor signs no lies, and that nobody reads the enclave's memory.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from darknight.errors import TrustError
from darknight.trust.fresh import KEY_BYTES, NONCE_BYTES
from darknight.trust.key_file import DataKey
from darknight.trust.keys import SIGNER_BYTES, EnclaveKey, seal_to
from darknight.trust.transcript import transcript
from darknight.types import Secret

_ATTEST = "darknight attest 1"
_RELEASE = "darknight release 1"
_REQUEST = "darknight request 1"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What an enclave says of itself in one conversation. `certificate`: of its TLS connection, DER."""

    nonce: bytes
    key: bytes
    certificate: bytes
    configuration: bytes

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise TrustError(f"a nonce of {len(self.nonce)} bytes; needs {NONCE_BYTES}.", check="nonce")

    @property
    def report_data(self) -> bytes:
        """The 64 bytes that the evidence must carry."""
        return transcript(_ATTEST, self.nonce, self.key, self.certificate, self.configuration_digest)

    @property
    def configuration_digest(self) -> bytes:
        return hashlib.sha256(self.configuration).digest()


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """One sealed checkpoint: its number in the job, the step it was taken after, and the digest of the file."""

    number: int
    step: int
    digest: str

    def words(self) -> dict[str, int | str]:
        return {"number": self.number, "step": self.step, "digest": self.digest}

    @classmethod
    def from_words(cls, words: object) -> Receipt:
        kinds = {"number": int, "step": int, "digest": str}
        if not isinstance(words, dict) or {key: type(value) for key, value in words.items()} != kinds:
            raise TrustError("a receipt that is none: needs number, step and digest.", check="receipt")
        receipt = cls(**words)
        if receipt.number < 1 or receipt.step < 0 or len(receipt.digest) != 64:
            raise TrustError("a receipt that is none: its numbers make no sense.", check="receipt")
        return receipt


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What keys are released for. job: its whole text; manifest: of the sealed data; resume: where it goes on."""

    offer: Offer
    job: bytes
    manifest: bytes
    resume: Receipt | None
    client: bytes

    @property
    def info(self) -> bytes:
        resume = b"" if self.resume is None else json.dumps(self.resume.words(), sort_keys=True).encode()
        return transcript(_RELEASE, self.offer.report_data, self.job, self.manifest, resume, self.client)


class JobKeys(Secret):
    """What the enclave needs for one job: the key of the data, and the job's own, which seals all that it writes."""

    def __init__(self, *, data: bytes, job: bytes) -> None:
        if len(data) != KEY_BYTES or len(job) != KEY_BYTES:
            raise TrustError(f"keys of {len(data)} and {len(job)} bytes; needs {KEY_BYTES} each.", check="key")
        self.data = DataKey(data)
        self._job = job

    def derived(self, purpose: str) -> DataKey:
        """A key of its own for each purpose: checkpoints, results, weights."""
        info = f"darknight {purpose} 1".encode()
        return DataKey(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self._job))

    def sealed(self, terms: Terms) -> bytes:
        """Step 4: the envelope for the enclave that was checked."""
        return seal_to(terms.offer.key, self.data.raw + self._job, info=terms.info)

    @classmethod
    def opened(cls, envelope: bytes, terms: Terms, key: EnclaveKey) -> JobKeys:
        """Step 5, in the enclave."""
        content = key.open(envelope, info=terms.info)
        return cls(data=content[:KEY_BYTES], job=content[KEY_BYTES:])


def request_message(offer: Offer, method: str, sequence: int, client: bytes, body: bytes) -> bytes:
    """What a client signs: one request, in one conversation, at one place in it."""
    if len(client) != SIGNER_BYTES:
        raise TrustError(f"a client's key of {len(client)} bytes; needs {SIGNER_BYTES}.", check="client")
    return transcript(_REQUEST, offer.report_data, method.encode(), sequence.to_bytes(8, "big"), client, body)
