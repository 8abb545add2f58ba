"""Checkpoints that only the client can have opened: sealed under a key that it releases.

    checkpoint-NUMBER-STEP.sealed    a blob (darknight.trust.blob) whose label has the job's name and the number

Guarantees: on the disk there is nothing of a checkpoint but its size. A file appears whole or not at all, and an older
    one goes only after that. One of another job, under another number, or changed in any bit does not open. Whether it
    is the newest only the client can know: it has a receipt for each (contract tests: tests/service/test_store.py,
    tests/service/test_protocol_attacks.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import nn

from darknight.errors import TrustError
from darknight.service.queue import in_words
from darknight.train import Best, Card, Checkpoint, checkpoint_as_bytes, checkpoint_from_bytes, tensors_as_bytes
from darknight.trust.blob import open_bytes, seal_bytes
from darknight.trust.bundle import packed, unpacked
from darknight.trust.durable import write_durably
from darknight.trust.key_file import DataKey
from darknight.trust.release import Receipt

BEST = "best.safetensors"
_NAME = re.compile(r"checkpoint-(\d{8,})-(\d{8,})\.sealed")
_KEEP = 2
_TRIES = 10  # a name that leads nowhere is the host's doing


class SealedStore:
    """A `train.Keeper` for one job. receipt: called with the receipt of each checkpoint once it is on the disk."""

    def __init__(self, folder: Path, key: DataKey, *, job: str, receipt: Callable[[Receipt], None]) -> None:
        self.folder = folder
        self._key, self._job, self._receipt = key, job, receipt
        self._number = 0
        self.best: bytes | None = None

    def open(self, receipt: Receipt) -> Checkpoint:
        """The checkpoint of this receipt and no other."""
        path = self.folder / f"checkpoint-{receipt.number:08}-{receipt.step:08}.sealed"
        with in_words(self.folder):
            sealed = path.read_bytes()
        if hashlib.sha256(sealed).hexdigest() != receipt.digest:
            raise TrustError(f"checkpoint {receipt.number} is not the one of the receipt.", check="checkpoint")
        files = unpacked(open_bytes(self._key, sealed, label=self._label(receipt.number)), path)
        self.best = files.pop(BEST, None)
        checkpoint = checkpoint_from_bytes(files, path)
        if checkpoint.step != receipt.step:
            raise TrustError(f"checkpoint {receipt.number} is of another step than its receipt.", check="checkpoint")
        self._number = receipt.number
        return checkpoint

    def save(self, checkpoint: Checkpoint) -> None:
        number = self._number + 1
        files = checkpoint_as_bytes(checkpoint)
        if self.best is not None:
            files[BEST] = self.best
        sealed = seal_bytes(self._key, packed(files), label=self._label(number))
        with in_words(self.folder):
            write_durably(self.folder / f"checkpoint-{number:08}-{checkpoint.step:08}.sealed", sealed)
            self._number = number
            for _, _, old in _checkpoints(self.folder)[:-_KEEP]:
                old.unlink()
        self._receipt(Receipt(number=number, step=checkpoint.step, digest=hashlib.sha256(sealed).hexdigest()))

    def save_best(self, card: Card, model: nn.Module, best: Best) -> None:
        """In memory; the next checkpoint has it."""
        words = {"card": card.words(), "epoch": best.epoch, "accuracy": best.accuracy}
        self.best, _ = tensors_as_bytes(model.state_dict(), words)

    def _label(self, number: int) -> bytes:
        return f"{self._job} checkpoint {number}".encode()


def newest(folder: Path) -> Receipt | None:
    """What the disk claims to be the newest checkpoint. Nobody vouches for it but the client's own receipt.

    It may be asked while a job runs: a file that is gone before it is read made way for a newer one, or all is over.
    """
    for _ in range(_TRIES):
        if not (found := _checkpoints(folder)):
            break
        number, step, path = found[-1]
        with in_words(folder), suppress(FileNotFoundError), path.open("rb") as file:
            return Receipt(number=number, step=step, digest=hashlib.file_digest(file, "sha256").hexdigest())
    return None


def _checkpoints(folder: Path) -> list[tuple[int, int, Path]]:
    """(number, step, file), the newest last."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), int(match[2]), path) for match, path in matches if match)
