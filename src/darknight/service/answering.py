"""What the enclave answers to its clients, method by method. Who may ask what is decided here and in `sessions`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from darknight.errors import DataError, TrustError, UsageError
from darknight.service.events import Events
from darknight.service.job import Job
from darknight.service.queue import CANCELLED, FAILED, FINISHED, RESULT, WAITING, WEIGHTS, Entry, Queue, in_words
from darknight.service.sealed_data import open_dataset, open_either
from darknight.service.sealed_store import newest
from darknight.service.sessions import Sessions
from darknight.trust.durable import sync_folder
from darknight.trust.release import JobKeys, Offer, Receipt, Terms
from darknight.trust.sealing import HEAD, MANIFEST, RECORDS
from darknight.wire.codec import BadFrame
from darknight.wire.job_channel import pieces
from darknight.wire.jobs import (
    ATTEST,
    CANCEL,
    FETCH,
    RELEASE,
    STATUS,
    SUBMIT,
    UPLOAD,
    WATCH,
    JobText,
    Request,
    dump,
    from_hex,
    load,
)

METHODS = (ATTEST, SUBMIT, UPLOAD, RELEASE, STATUS, WATCH, CANCEL, FETCH)
DATA_FILES = (HEAD, RECORDS, MANIFEST)  # the manifest last: with it a set is complete
_LARGEST_FILE = 1 << 44


class Answers:
    """A `wire.Answering` over a queue."""

    def __init__(self, queue: Queue, sessions: Sessions, *, workers: int) -> None:
        self._queue, self._sessions, self._workers = queue, sessions, workers

    # --- one answer --------------------------------------------------------------------------------------------------
    def answer(self, method: str, message: bytes) -> bytes:
        if method == ATTEST:
            return dump(self._attest(load(message)))
        request = Request.decode(method, message)
        offer, body = self._sessions.checked(request)
        if method == SUBMIT:
            return dump(self._submit(request, body))
        entry = self._queue.of(body.get("job"), request.client)
        if method == RELEASE:
            self._release(entry, offer, request, body)
        elif method == CANCEL:
            self._queue.cancel(entry)
        return dump(self._status(entry))

    def _attest(self, body: dict[str, Any]) -> dict[str, Any]:
        offer, evidence = self._sessions.attest(from_hex(body.get("nonce")))
        return {
            "key": offer.key.hex(),
            "configuration": offer.configuration.decode(),
            "evidence": evidence.to_words(),
        }

    def _submit(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        words = body.get("job")
        if not isinstance(words, str):
            raise BadFrame("a submission without a job")
        text = JobText.decode(words.encode())
        if text.client != request.client.hex():
            raise TrustError("a job of another client than the one that submits it.", check="client")
        return self._status(self._queue.add(text, Job.of(text, workers=self._workers)))

    def _release(self, entry: Entry, offer: Offer, request: Request, body: dict[str, Any]) -> None:
        """Step 5 of darknight.trust.release."""
        self._sessions.release_once(offer.nonce)
        if entry.state not in (WAITING, FAILED):
            raise TrustError(f"the job is {entry.state}; it waits for no keys.", check="state")
        if missing := self._missing(entry):
            raise UsageError(f"{', '.join(missing)} must be sent before the keys.")
        words = body.get("resume")
        resume = None if words is None else Receipt.from_words(words)
        manifest = bytes.fromhex(entry.text.data)
        terms = Terms(offer=offer, job=entry.text.encode(), manifest=manifest, resume=resume, client=request.client)
        keys = JobKeys.opened(from_hex(body.get("envelope")), terms, self._sessions.key)
        # A wrong key is told at once, and so are data that nothing can be trained on.
        (open_either if entry.job.recipe is None else open_dataset)(entry.data, keys.data, manifest=manifest)
        if resume != newest(entry.folder):
            raise TrustError("the checkpoint of the receipt is not the one that is here.", check="checkpoint")
        self._queue.release(entry, keys, resume)

    def _status(self, entry: Entry) -> dict[str, Any]:
        receipt = newest(entry.folder)
        result = entry.folder / RESULT
        return {
            "job": entry.name,
            "number": entry.number,
            "state": entry.state,
            "note": entry.note,
            "missing": self._missing(entry),
            "checkpoint": receipt and receipt.words(),
            "result_bytes": result.stat().st_size if result.exists() else None,
        }

    def _missing(self, entry: Entry) -> dict[str, int]:
        """Files that the client has to send, and how much of each is here already. For a job that is over, none."""
        if entry.state in (FINISHED, CANCELLED):
            return {}
        wanted = [entry.data / name for name in DATA_FILES]
        if entry.text.weights is not None:
            wanted.append(entry.folder / WEIGHTS)
        missing = {}
        for path in wanted:
            if not path.exists():
                begun = self._begun(entry, path)
                missing[path.name] = begun.stat().st_size if begun.exists() else 0
        return missing

    # --- files -------------------------------------------------------------------------------------------------------
    def take(self, message: bytes, chunks: Iterator[bytes]) -> bytes:
        """A file of the job, from `offset` on. What was sent before a connection broke need not be sent again.

        Nothing in it is believed: data and weights open only with keys that nobody has sent yet.
        """
        request = Request.decode(UPLOAD, message)
        _, body = self._sessions.checked(request)
        entry = self._queue.of(body.get("job"), request.client)
        name, size, offset = body.get("file"), body.get("size"), body.get("offset")
        if name not in self._missing(entry) or not all(type(number) is int for number in (size, offset)):
            raise UsageError(f"the enclave has {name!r} already, or wants no such file.")
        assert isinstance(name, str)
        assert isinstance(size, int)
        assert isinstance(offset, int)
        if not 0 <= offset <= size <= _LARGEST_FILE:
            raise UsageError(f"{name}: {size} bytes from {offset} on make no sense.")
        path = entry.folder / name if name == WEIGHTS else entry.data / name
        with in_words(self._queue.folder):
            path.parent.mkdir(exist_ok=True)
            self._write(self._begun(entry, path), offset, size, chunks)
            self._check(entry, self._begun(entry, path), name)
            self._begun(entry, path).replace(path)
            sync_folder(path.parent)
        return dump(self._status(entry))

    def _begun(self, entry: Entry, path: Path) -> Path:
        """Of this job alone: nobody else can write into what a client sends."""
        return entry.folder / f"upload-{path.name}"

    def _write(self, path: Path, offset: int, size: int, chunks: Iterator[bytes]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            if os.fstat(descriptor).st_size < offset:
                raise UsageError("what lies before the offset is not here. Send the file from its beginning.")
            file.truncate(offset)
            file.seek(offset)
            for chunk in chunks:
                if file.tell() + len(chunk) > size:
                    raise UsageError(f"more than the {size} bytes that were announced.")
                file.write(chunk)
            file.flush()
            os.fsync(descriptor)
            if file.tell() != size:
                raise DataError(f"{file.tell()} of {size} bytes came. Send the rest.")

    def _check(self, entry: Entry, path: Path, name: str) -> None:
        """Against mistakes, not against attackers: a wrong file is told at once, and can be sent again."""
        wanted = {MANIFEST: entry.text.data, WEIGHTS: entry.text.weights}.get(name)
        if wanted is None:
            return
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted:
            path.unlink()
            raise TrustError(f"{name} is not the one that the job names.", check="manifest")

    # --- streams -----------------------------------------------------------------------------------------------------
    def stream(self, method: str, message: bytes, gone: Callable[[], bool]) -> Iterator[bytes]:
        request = Request.decode(method, message)
        _, body = self._sessions.checked(request)
        entry = self._queue.of(body.get("job"), request.client)
        if method == WATCH:
            after = body.get("after")
            events: Events = entry.events
            yield from map(dump, events.after(after if type(after) is int else 0, gone))
        elif method == FETCH:
            path = entry.folder / RESULT
            if not path.exists():
                raise UsageError(f"the job is {entry.state}; it has no result yet.")
            with in_words(entry.folder), path.open("rb") as file:
                yield from pieces(file.read)
