"""A job from its submission to its result, through whatever happens to the enclave on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from darknight.client.conversation import Conversation
from darknight.client.job_folder import Accepted, JobFolder
from darknight.errors import DarKnightError, DataError, ServiceError, TrustError
from darknight.trust.blob import open_bytes
from darknight.trust.bundle import unpacked
from darknight.trust.durable import write_durably
from darknight.trust.policy import Policy
from darknight.trust.release import Receipt
from darknight.wire.job_channel import UNREACHABLE
from darknight.wire.jobs import CANCEL, FETCH, STATUS, SUBMIT, WATCH, load

WAITING, FINISHED, FAILED, CANCELLED = "waiting for keys", "finished", "failed", "cancelled"
_PAUSE = 1.0  # seconds between two attempts to reach an enclave that is gone


class Watcher(Protocol):
    """Whoever shows how far a job is."""

    def confirm(self, conversation: Conversation) -> bool:
        """Show what was attested and what the enclave does; True if the user goes on. Asked once for a job."""

    def sending(self, name: str, size: int) -> Callable[[int], None]:
        """A file goes to the enclave; what it gives is called with how many bytes more."""

    def event(self, words: dict[str, Any]) -> None:
        """Something happened in the job."""

    def lost(self, error: ServiceError) -> None:
        """The enclave does not answer; it is tried again."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job is done. patience: seconds to wait for an enclave that does not answer."""

    address: str
    policy: Policy
    patience: float = 0.0


def submit(folder: JobFolder, place: Place, watcher: Watcher) -> dict[str, bytes]:
    """Submit the job, or go on with one that was submitted; watch it to its end; give the files of the result.

    Whenever the enclave was restarted it attests anew, and keys are released again, for the newest checkpoint only.
    """
    waited, released = time.monotonic(), False
    while True:
        try:
            with _accepted(folder, place, watcher) as conversation:
                status = _brought(folder, conversation, watcher)
                waited = time.monotonic()
                if status["state"] == WAITING or (status["state"] == FAILED and not released):
                    resume = folder.checked_resume(_receipt(status["checkpoint"]))
                    folder.releasing(resume)
                    conversation.release(folder.text, folder.keys, resume)
                    released = True
                last = _watched(folder, conversation, watcher)
                waited = time.monotonic()
                if last is not None:
                    _refuse_unfinished(last)
                    return _fetched(folder, conversation)
        except ServiceError as error:
            if error.check != UNREACHABLE or time.monotonic() - waited > place.patience:
                raise
            watcher.lost(error)
            time.sleep(_PAUSE)


def status_of(folder: JobFolder, place: Place, watcher: Watcher) -> dict[str, Any]:
    with _accepted(folder, place, watcher) as conversation:
        return conversation.ask(STATUS, job=folder.text.name)


def cancel(folder: JobFolder, place: Place, watcher: Watcher) -> dict[str, Any]:
    with _accepted(folder, place, watcher) as conversation:
        return conversation.ask(CANCEL, job=folder.text.name)


def fetch(folder: JobFolder, place: Place, watcher: Watcher) -> dict[str, bytes]:
    """The result of a job that is finished."""
    with _accepted(folder, place, watcher) as conversation:
        _refuse_unfinished(conversation.ask(STATUS, job=folder.text.name))
        return _fetched(folder, conversation)


def write_result(folder: JobFolder, files: dict[str, bytes]) -> list[Path]:
    """Each file in the job's folder, whole or not at all."""
    written = []
    for name, content in files.items():
        path = folder.path / name
        try:
            write_durably(path, content)
        except OSError as error:
            raise DarKnightError(
                f"cannot write {path}: {error.strerror}. Make room, then fetch it again: the enclave still has it."
            ) from error
        written.append(path)
    return written


def _accepted(folder: JobFolder, place: Place, watcher: Watcher) -> Conversation:
    """A conversation with an enclave whose evidence holds, and that the user said yes to."""
    conversation = Conversation(place.address, folder.client, place.policy)
    try:
        found = Accepted(
            measurement=conversation.attested.measurement.hex(),
            configuration=conversation.offer.configuration_digest.hex(),
            simulated=conversation.attested.simulated,
        )
        if folder.accepted() != found:
            if not watcher.confirm(conversation):
                raise TrustError("you did not accept this enclave. Nothing was released.", check="refused")
            folder.accept(found)
    except BaseException:
        conversation.__exit__(None, None, None)
        raise
    return conversation


def _brought(folder: JobFolder, conversation: Conversation, watcher: Watcher) -> dict[str, Any]:
    """The job is known there, with everything that it needs but the keys."""
    status = conversation.ask(SUBMIT, job=folder.text.encode().decode())
    files = folder.files()
    for name, offset in status["missing"].items():
        if name not in files:
            raise DataError(f"the enclave asks for {str(name)[:40]!r}, which is no file of this job.")
        size = files[name].stat().st_size
        more = watcher.sending(name, size)
        more(min(offset, size))
        conversation.upload(files[name], job=folder.text.name, offset=min(offset, size), more=more)
    return conversation.ask(STATUS, job=folder.text.name)


def _watched(folder: JobFolder, conversation: Conversation, watcher: Watcher) -> dict[str, Any] | None:
    """Until the job is over; its last status, or None if the connection ended before."""
    for message in conversation.listen(WATCH, job=folder.text.name, after=0):
        words = load(message)
        if words.get("kind") == "checkpoint":
            folder.keep(Receipt.from_words(words.get("receipt")))
        watcher.event(words)
    status = conversation.ask(STATUS, job=folder.text.name)
    return status if status["state"] in (FINISHED, FAILED, CANCELLED) else None


def _refuse_unfinished(status: dict[str, Any]) -> None:
    if status["state"] != FINISHED:
        note = f": {status['note']}" if status["note"] else ""
        raise ServiceError(f"the job is {status['state']}{note}", check="state")


def _fetched(folder: JobFolder, conversation: Conversation) -> dict[str, bytes]:
    sealed = b"".join(conversation.listen(FETCH, job=folder.text.name))
    opened = open_bytes(folder.keys.derived("result"), sealed, label=f"{folder.text.name} result".encode())
    return unpacked(opened, folder.path)


def _receipt(words: object) -> Receipt | None:
    return None if words is None else Receipt.from_words(words)
