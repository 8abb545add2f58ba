"""One conversation with an enclave: it proves what it is, then everything the client says is signed.

The steps are those of darknight.trust.release.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from darknight.errors import TrustError, other_format
from darknight.trust.evidence import Evidence
from darknight.trust.fresh import fresh_nonce
from darknight.trust.keys import ClientKey
from darknight.trust.policy import Policy
from darknight.trust.release import JobKeys, Offer, Receipt, Terms, request_message
from darknight.trust.verify import Attested, attested
from darknight.wire.codec import BadFrame
from darknight.wire.job_channel import JobChannel, pieces
from darknight.wire.jobs import ATTEST, CONFIGURATION, RELEASE, UPLOAD, JobText, Request, dump, from_hex, load


class Conversation:
    """Open from the moment the evidence was found good; use it as a context.

    attested: what was found. configuration: what the enclave says it does, which the evidence covers.
    """

    def __init__(self, address: str, client: ClientKey, policy: Policy) -> None:
        self._client = client
        self._sequence = 0
        self._channel = JobChannel(address)
        try:
            nonce = fresh_nonce()
            with _understanding(address):
                words = load(self._channel.ask(ATTEST, dump({"nonce": nonce.hex()})))
                configuration = words.get("configuration")
                if not isinstance(configuration, str):
                    raise BadFrame("an enclave without a configuration")
                self.offer = Offer(
                    nonce=nonce,
                    key=from_hex(words.get("key")),
                    certificate=self._channel.certificate,
                    configuration=configuration.encode(),
                )
                evidence = Evidence.from_words(words.get("evidence"))
                self.configuration: dict[str, Any] = load(self.offer.configuration)
            # Read by other rules than it was written by, it could say something else than it means.
            if (found := self.configuration.get("format")) != CONFIGURATION:
                raise TrustError(
                    f"{self._channel.address}: the enclave's configuration is of "
                    f"{other_format(found, reads=CONFIGURATION)}. Nothing was released.",
                    check="version",
                )
            self.attested: Attested = attested(
                evidence, policy=policy, now=int(time.time()), report_data=self.offer.report_data
            )
            if policy.configurations and self.offer.configuration_digest not in policy.configurations:
                raise TrustError(
                    "the enclave is set up for something else: its configuration, and so its workers, is none of the "
                    "policy's. Nothing was released.",
                    check="configuration",
                )
        except BaseException:
            self._channel.close()
            raise

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def ask(self, method: str, **body: Any) -> dict[str, Any]:
        with _understanding(self._channel.address):
            return load(self._channel.ask(method, self._signed(method, body)))

    def listen(self, method: str, **body: Any) -> Iterator[bytes]:
        return self._channel.listen(method, self._signed(method, body))

    def upload(self, path: Path, *, job: str, offset: int, more: Callable[[int], None]) -> None:
        """Send a file from `offset` on; `more` is called with how many bytes go, as they go."""
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(offset)

            def counted() -> Iterator[bytes]:
                for chunk in pieces(file.read):
                    more(len(chunk))
                    yield chunk

            body = {"job": job, "file": path.name, "size": size, "offset": offset}
            self._channel.send(self._signed(UPLOAD, body), counted())

    def release(self, text: JobText, keys: JobKeys, resume: Receipt | None) -> dict[str, Any]:
        """Step 4: the keys of a job, for this enclave alone."""
        terms = Terms(
            offer=self.offer,
            job=text.encode(),
            manifest=bytes.fromhex(text.data),
            resume=resume,
            client=self._client.public,
        )
        envelope = keys.sealed(terms).hex()
        return self.ask(RELEASE, job=text.name, envelope=envelope, resume=resume and resume.words())

    def _signed(self, method: str, body: dict[str, Any]) -> bytes:
        self._sequence += 1
        content = dump(body)
        message = request_message(self.offer, method, self._sequence, self._client.public, content)
        request = Request(
            method=method,
            nonce=self.offer.nonce,
            sequence=self._sequence,
            client=self._client.public,
            body=content,
            signature=self._client.sign(message),
        )
        return request.encode()


class _understanding:  # noqa: N801 - a context, read as a word
    """What is no message is not an enclave's."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadFrame | json.JSONDecodeError):
            raise TrustError(f"{self._address}: what answers there is no enclave ({error}).", check="format") from error
