"""The keys at both ends: the enclave's, which data keys are encrypted to, and the client's, which signs what it asks.

Guarantees: the enclave's key exists in its memory alone and ends with the process. What was encrypted to it opens only
    with the same `info`, so it cannot be used in another conversation. It is a hybrid of X25519 and ML-KEM-768: to
    open what was recorded, both have to be broken. Keys show themselves in no repr, pickle or comparison. Contract
    tests: tests/trust/test_keys.py.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from darknight.errors import TrustError
from darknight.types import Secret

_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_KEM_BYTES, _CURVE_BYTES = 1184, 32
PUBLIC_BYTES = _KEM_BYTES + _CURVE_BYTES
SIGNATURE_BYTES = 64
SIGNER_BYTES = 32


class EnclaveKey(Secret):
    """Made when the enclave starts, and never stored."""

    def __init__(self) -> None:
        kem, curve = MLKEM768PrivateKey.generate(), X25519PrivateKey.generate()
        self._key = MLKEM768X25519PrivateKey(kem, curve)
        self.public = kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()

    def open(self, envelope: bytes, *, info: bytes) -> bytes:
        """What `seal_to` sealed for this key with the same `info`; TrustError for anything else."""
        try:
            return _SUITE.decrypt(envelope, self._key, info=info)
        except (InvalidTag, ValueError):
            raise TrustError(
                "keys that are not for this enclave, not for this conversation, or damaged. Attest again.",
                check="envelope",
            ) from None


def seal_to(public: bytes, content: bytes, *, info: bytes) -> bytes:
    """`content` for the holder of an enclave's key, in a conversation whose every word is in `info`."""
    if len(public) != PUBLIC_BYTES:
        raise TrustError(f"the enclave's key has {len(public)} bytes; needs {PUBLIC_BYTES}.", check="key")
    try:
        kem = MLKEM768PublicKey.from_public_bytes(public[:_KEM_BYTES])
        curve = X25519PublicKey.from_public_bytes(public[_KEM_BYTES:])
        return _SUITE.encrypt(content, MLKEM768X25519PublicKey(kem, curve), info=info)
    except ValueError:
        raise TrustError("the enclave's key is no key at all. Do not go on with it.", check="key") from None


class ClientKey(Secret):
    """Who submitted a job, and nobody else, may ask for it."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def check_signature(public: bytes, message: bytes, signature: bytes) -> None:
    """TrustError unless the holder of the client's key signed exactly this."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise TrustError(
            "a request that its client did not sign. Use the key of the job, on the connection that was attested.",
            check="signature",
        ) from None
