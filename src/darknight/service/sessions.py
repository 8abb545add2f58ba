"""Conversations with clients: evidence for a nonce, and requests that are signed in that conversation.

Guarantees: a nonce is attested once and releases keys once. A request counts once: its place in the conversation only
    grows, and its signature covers the conversation, the method and every byte of it. Contract tests:
    tests/service/test_protocol_attacks.py.
Leaks: to strangers, the evidence and the configuration: they are public.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from darknight.errors import TrustError
from darknight.trust.evidence import Evidence
from darknight.trust.keys import EnclaveKey, check_signature
from darknight.trust.platforms import Provider
from darknight.trust.release import Offer, request_message
from darknight.wire.identity import Identity
from darknight.wire.jobs import Request, load

_CONVERSATIONS = 4096  # that are remembered; the oldest must attest again


@dataclass
class _Conversation:
    offer: Offer
    sequence: int = 0


class Sessions:
    """All conversations since the enclave started. key: the one that data keys are encrypted to."""

    def __init__(self, provider: Provider, identity: Identity, configuration: bytes) -> None:
        self.key = EnclaveKey()
        self._provider = provider
        certificate = x509.load_pem_x509_certificate(identity.certificate)
        self._certificate = certificate.public_bytes(Encoding.DER)
        self._configuration = configuration
        self._open: OrderedDict[bytes, _Conversation] = OrderedDict()
        self._released: set[bytes] = set()
        self._lock = threading.Lock()

    def attest(self, nonce: bytes) -> tuple[Offer, Evidence]:
        """A new conversation."""
        offer = Offer(
            nonce=nonce, key=self.key.public, certificate=self._certificate, configuration=self._configuration
        )
        with self._lock:
            if nonce in self._open or nonce in self._released:
                raise TrustError("this nonce was used before. Draw a fresh one.", check="nonce")
            evidence = self._provider.evidence(offer.report_data)
            self._open[nonce] = _Conversation(offer)
            while len(self._open) > _CONVERSATIONS:
                self._open.popitem(last=False)
        return offer, evidence

    def checked(self, request: Request) -> tuple[Offer, dict[str, Any]]:
        """The body of a request that its client signed, in this conversation and at this place."""
        with self._lock:
            conversation = self._open.get(request.nonce)
            if conversation is None:
                raise TrustError("a conversation that this enclave does not know. Attest first.", check="nonce")
            message = request_message(
                conversation.offer, request.method, request.sequence, request.client, request.body
            )
            check_signature(request.client, message, request.signature)
            if request.sequence <= conversation.sequence:
                raise TrustError("a request that was made before. Do not send it twice.", check="sequence")
            conversation.sequence = request.sequence
        return conversation.offer, load(request.body)

    def release_once(self, nonce: bytes) -> None:
        """Marks the nonce as used; TrustError if it was."""
        with self._lock:
            if nonce in self._released:
                raise TrustError("keys were released in this conversation already. Attest again.", check="nonce")
            self._released.add(nonce)
