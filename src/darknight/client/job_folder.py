"""What a client keeps of a job until it has the result: its key, its text, receipts, and whom it accepted.

    OUTPUT/job.key          0600: seals checkpoints and result, and says who the client is
    OUTPUT/job.json         what was submitted
    OUTPUT/weights.sealed   what was sent with it
    OUTPUT/receipts.json    the newest checkpoint that the enclave confirmed
    OUTPUT/accepted.json    the enclave and the configuration that the user accepted
    OUTPUT/released.json    for a job with a budget: the checkpoint that keys were last released for

Guarantees: after a receipt for a checkpoint, keys are never released for an older or another one: who rolls a disk back
    is refused. Steps of a job with a leakage budget are done at most twice: who kills the enclave again before it has
    reached another checkpoint gets no keys any more, as each repetition shows workers the same steps under fresh noise.
    (Contract test: tests/client/test_job_folder.py.) Nothing is overwritten but receipts, and these whole.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darknight.client.job_file import JobFile
from darknight.client.seal import open_with
from darknight.data import unpack_dataset
from darknight.errors import DarKnightError, TrustError, UsageError
from darknight.trust.blob import seal_bytes
from darknight.trust.durable import write_durably
from darknight.trust.fresh import fresh_nonce
from darknight.trust.key_file import DataKey, KeyFile, read_key_file, write_key_file
from darknight.trust.keys import ClientKey
from darknight.trust.release import JobKeys, Receipt
from darknight.trust.sealing import MANIFEST
from darknight.wire.codec import BadFrame
from darknight.wire.jobs import JobText, dump

KEY, TEXT, WEIGHTS = "job.key", "job.json", "weights.sealed"
RECEIPTS, ACCEPTED, RELEASED = "receipts.json", "accepted.json", "released.json"


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Whom the user said yes to: the measurement, and the digest of the configuration."""

    measurement: str
    configuration: str
    simulated: bool

    def words(self) -> dict[str, Any]:
        return {"measurement": self.measurement, "configuration": self.configuration, "simulated": self.simulated}


@dataclass(frozen=True, eq=False, kw_only=True)
class JobFolder:
    """A job of this client. sealed: the folder of its data."""

    path: Path
    text: JobText
    keys: JobKeys
    client: ClientKey
    sealed: Path

    @classmethod
    def open(cls, file: JobFile) -> JobFolder:
        """The job of this file: as it was submitted before, or a new one. A file that has changed since is refused."""
        manifest = _manifest(file)
        if not (file.output / TEXT).exists():
            _check_labels(file, manifest)
            _create(file, manifest)
        job_key = read_key_file(file.output / KEY).key
        keys = JobKeys(data=_data_key(file, manifest).raw, job=job_key.raw)
        client = ClientKey(keys.derived("client").raw)
        try:
            text = JobText.decode((file.output / TEXT).read_bytes())
        except BadFrame as error:
            raise UsageError(f"{file.output / TEXT}: {error}. Put it back, or choose another output.") from error
        wanted = _text(file, manifest, salt=text.salt, client=client, weights=text.weights)
        if wanted != text:
            raise UsageError(
                f"{file.path} has changed since the job in {file.output} was submitted. Put it back, or choose another "
                "output for a new job."
            )
        return cls(path=file.output, text=text, keys=keys, client=client, sealed=file.sealed)

    # --- receipts ---------------------------------------------------------------------------------------------------
    def newest(self) -> Receipt | None:
        """Of all checkpoints that the enclave confirmed to this client."""
        try:
            return Receipt.from_words(json.loads((self.path / RECEIPTS).read_bytes()))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise TrustError(f"{self.path / RECEIPTS} is damaged. Put it back from a copy.", check="receipt") from error

    def keep(self, receipt: Receipt) -> None:
        known = self.newest()
        if known is None or receipt.number > known.number:
            write_durably(self.path / RECEIPTS, dump(receipt.words()))

    def checked_resume(self, claimed: Receipt | None) -> Receipt | None:
        """Where the job may go on, of what the enclave's disk has. An older checkpoint, or another one, is refused.

        A newer one is fine: the connection may have broken before its receipt came, and it opens only if it is one of
        this job, under its own number.
        """
        known = self.newest()
        if known is not None and (claimed is None or claimed.number < known.number):
            found = "none" if claimed is None else f"number {claimed.number}"
            raise TrustError(
                f"the enclave's disk was rolled back: it has checkpoint {found}, and this client a receipt for number "
                f"{known.number}. Ask the operator to put it back. Keys were not released.",
                check="rollback",
            )
        if known is not None and claimed is not None and claimed.number == known.number and claimed != known:
            raise TrustError(
                f"checkpoint {known.number} on the enclave's disk is not the one of this client's receipt. "
                "Keys were not released.",
                check="rollback",
            )
        return claimed

    def releasing(self, resume: Receipt | None) -> None:
        """Noted before keys go. With a budget, once for a beginning and once for each checkpoint."""
        if self.text.leakage_budget is None:
            return
        number = 0 if resume is None else resume.number
        path = self.path / RELEASED
        try:
            last = json.loads(path.read_bytes())["number"] if path.exists() else -1
        except (ValueError, KeyError, TypeError) as error:
            raise TrustError(f"{path} is damaged. Put it back from a copy.", check="budget") from error
        if number <= last:
            raise TrustError(
                f"keys were released for this place already (checkpoint {number}), and the enclave was stopped before "
                "it reached another. Going on would show workers the same steps once more, which the budget does not "
                f"count. If nobody meant it, remove {path} and submit again.",
                check="budget",
            )
        write_durably(path, dump({"number": number}))

    # --- whom the user accepted -------------------------------------------------------------------------------------
    def accepted(self) -> Accepted | None:
        try:
            return Accepted(**json.loads((self.path / ACCEPTED).read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self.path / ACCEPTED} is damaged. Remove it, and you are asked again.") from error

    def accept(self, accepted: Accepted) -> None:
        write_durably(self.path / ACCEPTED, dump(accepted.words()))

    def files(self) -> dict[str, Path]:
        """What the enclave may ask for, by name."""
        found = {path.name: path for path in self.sealed.iterdir() if path.is_file()}
        return {**found, WEIGHTS: self.path / WEIGHTS}


def _check_labels(file: JobFile, manifest: bytes) -> None:
    """Training needs labels. Whether there are any is in the sealed head, where a host does not see it."""
    if file.kind == "train":
        _data_key(file, manifest)
        records = open_with(file.sealed, file.key)
        unpack_dataset(records.head, records)


def _create(file: JobFile, manifest: bytes) -> None:
    """The key first, the text last: with it the job is there."""
    try:
        file.output.mkdir(parents=True, exist_ok=True)
        if not (file.output / KEY).exists():
            write_key_file(file.output / KEY, KeyFile(key=DataKey.fresh()))
        keys = JobKeys(data=_data_key(file, manifest).raw, job=read_key_file(file.output / KEY).key.raw)
        salt, weights = fresh_nonce().hex(), None
        if file.weights is not None:
            sealed = seal_bytes(keys.derived("weights"), _content(file.weights), label=f"{salt} weights".encode())
            write_durably(file.output / WEIGHTS, sealed)
            weights = hashlib.sha256(sealed).hexdigest()
        client = ClientKey(keys.derived("client").raw)
        text = _text(file, manifest, salt=salt, client=client, weights=weights)
        write_durably(file.output / TEXT, text.encode())
    except OSError as error:
        raise DarKnightError(f"cannot write to {file.output}: {error.strerror}. Choose another output.") from error


def _text(file: JobFile, manifest: bytes, *, salt: str, client: ClientKey, weights: str | None) -> JobText:
    return JobText(
        salt=salt,
        client=client.public.hex(),
        kind=file.kind,
        model=dict(file.model),
        weights=weights,
        recipe=None if file.recipe is None else dict(file.recipe),
        augment=file.augment,
        scheme=dict(file.scheme),
        leakage_budget=file.leakage_budget,
        save_every=file.save_every,
        data=hashlib.sha256(manifest).hexdigest(),
        part=file.part,
        top=file.top,
    )


def _manifest(file: JobFile) -> bytes:
    return _content(file.sealed / MANIFEST)


def _data_key(file: JobFile, manifest: bytes) -> DataKey:
    """The key of these data: a key file knows which set it opens."""
    found = read_key_file(file.key)
    if found.manifest is not None and found.manifest != hashlib.sha256(manifest).digest():
        raise TrustError(f"{file.key} is the key of other data than {file.sealed}. Give the right one.", check="key")
    return found.key


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Correct the path.") from error
