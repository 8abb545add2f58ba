"""The jobs of an enclave, on a disk that is not trusted: everything there is public, sealed, or signed by a client.

    DIR/jobs/00000001-NAME/job.json           what the client asked for, as it signed it
                           state.json         how far it is
                           weights.sealed     what it starts from, if that is not random
                           checkpoint-...     see darknight.service.sealed_store
                           data/              the sealed data set, until the job is over
                           result.sealed

Guarantees: a process that is killed at any moment loses no job that was confirmed and no checkpoint that was written.
    After a restart every job that is not over waits for its keys: they were in memory alone. A disk that is full fails
    the job that it has no room for, and nothing else. Contract tests: tests/service/test_kill.py,
    tests/service/test_program.py.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from darknight.errors import DarKnightError, DataError, TrustError, UsageError
from darknight.service.events import Events
from darknight.service.job import Job
from darknight.trust.durable import sweep, sync_folder, write_durably
from darknight.trust.release import JobKeys, Receipt
from darknight.wire.codec import BadFrame
from darknight.wire.identity import lock_alone
from darknight.wire.jobs import JobText, dump, load

WAITING, READY, RUNNING = "waiting for keys", "queued", "running"
FINISHED, FAILED, CANCELLED = "finished", "failed", "cancelled"
OVER = (FINISHED, FAILED, CANCELLED)
JOB, STATE, WEIGHTS, RESULT = "job.json", "state.json", "weights.sealed", "result.sealed"
_LONGEST_NOTE = 1000
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{32})")

log = logging.getLogger("darknight.enclave")


@dataclass(eq=False)
class Entry:
    """One job and how far it is. keys and resume: since the client released them, in this process."""

    number: int
    folder: Path
    job: Job
    state: str
    note: str = ""
    keys: JobKeys | None = None
    resume: Receipt | None = None
    cancelled: bool = False
    events: Events = field(default_factory=Events)

    @property
    def name(self) -> str:
        return self.job.text.name

    @property
    def text(self) -> JobText:
        return self.job.text

    @property
    def data(self) -> Path:
        """A folder of this job alone: what another client sends cannot get in its way."""
        return self.folder / "data"


class Queue:
    """The jobs in `folder`, in the order in which they came. One enclave at a time has the folder."""

    def __init__(self, folder: Path, *, workers: int) -> None:
        self.folder = folder
        self._workers = workers
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        try:
            (folder / "jobs").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"the queue cannot be in {folder}: {error.strerror}. Choose another --state.") from error
        if not lock_alone(self._lock):
            os.close(self._lock)
            raise UsageError(f"{folder} is in use by another enclave. Choose another --state.")
        for path in sorted((folder / "jobs").iterdir()):
            if match := _NAME.fullmatch(path.name):
                self._load(path, int(match[1]), match[2])

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def add(self, text: JobText, job: Job) -> Entry:
        """Kept on the disk when it returns. The same job again is the same entry."""
        with self._changed, in_words(self.folder):
            if (known := self._entries.get(text.name)) is not None:
                return known
            number = 1 + max((entry.number for entry in self._entries.values()), default=0)
            path = self.folder / "jobs" / f"{number:08}-{text.name}"
            path.mkdir(exist_ok=True)  # left by an attempt that found no room
            write_durably(path / JOB, text.encode())
            sync_folder(path.parent)
            entry = Entry(number, path, job, WAITING)
            self._entries[entry.name] = entry
            entry.events.add("state", state=WAITING)
            return entry

    def of(self, name: object, client: bytes) -> Entry:
        """The client's own job. Whether somebody else has one of that name is not said."""
        entry = self._entries.get(name) if isinstance(name, str) else None
        if entry is None or entry.text.client != client.hex():
            raise TrustError(
                "this client has no such job here. Submit it, or use the key that submitted it.", check="job"
            )
        return entry

    def release(self, entry: Entry, keys: JobKeys, resume: Receipt | None) -> None:
        """The job can run. It goes on from `resume`, or from the beginning."""
        with self._changed:
            if entry.state not in (WAITING, FAILED):
                raise TrustError(f"the job is {entry.state}; it waits for no keys.", check="state")
            if entry.events.closed:
                entry.events = Events()
            entry.keys, entry.resume, entry.cancelled = keys, resume, False
            self._set_anyway(entry, READY)
            self._changed.notify_all()

    def cancel(self, entry: Entry) -> None:
        """At once if it does not run; otherwise after the step that it is in."""
        with self._changed:
            entry.cancelled = True
            if entry.state in (WAITING, READY, FAILED):
                self._set(entry, CANCELLED)

    def next(self, timeout: float) -> Entry | None:
        """The first job that has its keys, running from now on; None if there is none after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready() is not None, timeout)
            entry = self._ready()
            if entry is not None:
                self._set_anyway(entry, RUNNING)
            return entry

    def over(self, entry: Entry, state: str, note: str = "") -> None:
        with self._changed:
            self._set_anyway(entry, state, note)

    def _ready(self) -> Entry | None:
        ready = [entry for entry in self._entries.values() if entry.state == READY]
        return min(ready, key=lambda entry: entry.number, default=None)

    def _set(self, entry: Entry, state: str, note: str = "") -> None:
        with in_words(self.folder):
            write_durably(entry.folder / STATE, dump({"state": state, "note": note}))
        _tell(entry, state, note)
        _tidy(entry)

    def _set_anyway(self, entry: Entry, state: str, note: str = "") -> None:
        """Also where the disk takes nothing more: the other jobs go on. After a restart this one waits for its keys."""
        try:
            self._set(entry, state, note)
        except DarKnightError as error:
            log.warning("job %d is %s, and that is not kept: %s", entry.number, state, error)
            _tell(entry, state, note)

    def _load(self, path: Path, number: int, name: str) -> None:
        """A job of an earlier process. Who changed the files of one only loses that one."""
        if not (path / JOB).exists():  # killed before it was confirmed
            shutil.rmtree(path, ignore_errors=True)
            return
        try:
            sweep(path)
            text = JobText.decode((path / JOB).read_bytes())
            if text.name != name:
                raise DataError("its text is of another name")
            words = load((path / STATE).read_bytes()) if (path / STATE).exists() else {}
            entry = Entry(number, path, Job.of(text, workers=self._workers), *_read_state(words))
        except (DarKnightError, BadFrame, OSError) as error:
            log.warning("job %d is left as it is and not run: %s", number, error)
            return
        if entry.state not in OVER:
            entry.state = WAITING
        entry.events.add("state", state=entry.state, note=entry.note)
        if entry.state in OVER:
            entry.events.close()
            _tidy(entry)
        self._entries[name] = entry


def _read_state(words: dict[str, Any]) -> tuple[str, str]:
    """State and note, from a disk whose owner may have written anything there: a client will read it."""
    state, note = words.get("state", WAITING), words.get("note", "")
    if state not in (*OVER, WAITING, READY, RUNNING) or not isinstance(note, str):
        raise DataError("a state that is none")
    return state, "".join(sign if sign.isprintable() else "?" for sign in note[:_LONGEST_NOTE])


def _tell(entry: Entry, state: str, note: str) -> None:
    entry.state, entry.note = state, note
    entry.events.add("state", state=state, note=note)
    if state in OVER:
        entry.keys = entry.resume = None
        entry.events.close()


def _tidy(entry: Entry) -> None:
    """A job that will never go on keeps its text and its result. One that failed may: its client can try again."""
    if entry.state in (FINISHED, CANCELLED):
        shutil.rmtree(entry.data, ignore_errors=True)
        with suppress(OSError):  # what cannot be removed was not put there by us
            for path in entry.folder.iterdir():
                if path.name not in (JOB, STATE, RESULT):
                    path.unlink(missing_ok=True)


@contextmanager
def in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DarKnightError(f"the enclave cannot write to {folder}: {error.strerror}. Make room there.") from error
