"""The folder of a training's checkpoints: step-00000123/, and the best model so far.

Guarantees: a process that is killed at any moment, a machine that loses power, or a full disk leaves the last good
checkpoint as it was: a new one is written to a folder of another name, every file and then the folder is on the disk
before it gets its own name, and older ones go only after that. Contract tests: tests/train/test_crashes.py.
Assumes: a file system on which rename is atomic and fsync waits for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from torch import Tensor, nn

from darknight.errors import DarKnightError, DataError, UsageError
from darknight.train.card import Card
from darknight.train.checkpoint import MODEL, Checkpoint, read_checkpoint, write_checkpoint, write_json
from darknight.train.history import Best
from darknight.train.tensor_file import read_tensors, sync, write_tensors

BEST, BEST_WORDS = "best.safetensors", "best.json"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_TEMPORARY = ".unfinished-"


class Store:
    """The checkpoints in `folder`, which is made if need be. Only one training at a time can have it.

    keep: how many checkpoints stay.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}; needs a whole number of at least 1.")
        self.folder = folder
        self._keep = keep
        with _in_words(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._lock)
                if error.errno != errno.EWOULDBLOCK:
                    raise
                raise UsageError(f"{folder} is in use by another training. Choose another folder.") from error
            self._sweep()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write one more checkpoint, then remove those that are older than the last few."""
        with _in_words(self.folder):
            temporary = self._temporary(f"step-{checkpoint.step}")
            try:
                temporary.mkdir()
                write_checkpoint(temporary, checkpoint)
                sync(temporary)
                target = self._free_name(checkpoint.step)
                temporary.rename(target)
                sync(self.folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            for old in self.checkpoints()[: -self._keep]:
                self._remove(old)
        return target

    def save_best(self, card: Card, model: nn.Module, best: Best) -> None:
        """The weights and what they are, in one file; best.json says the same for people."""
        with _in_words(self.folder):
            words = {"card": card.words(), "epoch": best.epoch, "accuracy": best.accuracy}
            for name in (BEST, BEST_WORDS):
                temporary = self._temporary(name)
                try:
                    if name == BEST:
                        write_tensors(temporary, model.state_dict(), words)
                    else:
                        write_json(temporary, words)
                    temporary.replace(self.folder / name)
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
            sync(self.folder)

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return checkpoints_in(self.folder)

    def clear(self) -> None:
        """Remove all checkpoints and the best model."""
        with _in_words(self.folder):
            for old in self.checkpoints():
                self._remove(old)
            for name in (BEST, BEST_WORDS):
                (self.folder / name).unlink(missing_ok=True)

    def latest(self) -> Checkpoint | None:
        """The newest one; None if there is none. One that is damaged is an error that says what else there is."""
        found = self.checkpoints()
        if not found:
            return None
        try:
            return read_checkpoint(found[-1])
        except DataError as error:
            if len(found) == 1:
                raise
            raise DataError(f"{error} (Remove {found[-1]} to go on with {found[-2].name}.)") from error

    def _free_name(self, step: int) -> Path:
        """A step may be saved twice, before and after its evaluation."""
        path, number = self.folder / f"step-{step:08}", 1
        while path.exists():
            number += 1
            path = self.folder / f"step-{step:08}-{number}"
        return path

    def _remove(self, path: Path) -> None:
        """Under another name first, so that nobody takes half of it for a checkpoint."""
        temporary = self._temporary(path.name)
        path.rename(temporary)
        shutil.rmtree(temporary)

    def _sweep(self) -> None:
        """What a killed process left behind."""
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _temporary(self, name: str) -> Path:
        return self.folder / f"{_TEMPORARY}{name}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    try:
        found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}). Give a folder of checkpoints.") from error
    return [path for _, path in sorted(found, key=lambda one: (int(one[0][1]), int(one[0][2] or 1)))]


def find_model(path: Path) -> Path:
    """The file of weights that `path` means: itself, a checkpoint's, or the best one of a folder of checkpoints."""
    if path.is_file():
        return path
    for candidate in (path / MODEL, path / BEST, *(each / MODEL for each in reversed(_inside(path)))):
        if candidate.is_file():
            return candidate
    if (path / "checkpoints").is_dir():
        return find_model(path / "checkpoints")
    raise DataError(f"{path}: no checkpoint. Give a file or a folder that `darknight train` wrote.")


def read_model(path: Path) -> tuple[dict[str, Tensor], Card, Path]:
    """Weights for the model that the card describes, and the file that they are in."""
    file = find_model(path)
    tensors, words, _ = read_tensors(file)
    return tensors, Card.from_words(words.get("card"), file), file


def _inside(path: Path) -> list[Path]:
    return checkpoints_in(path) if path.is_dir() else []


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DarKnightError(
            f"cannot write to {folder}: {error.strerror}. Make room there or choose another folder; "
            "what was saved before is still there."
        ) from error
