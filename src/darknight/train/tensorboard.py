"""Curves for TensorBoard, an extra."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from darknight.errors import DarKnightError, UsageError
from darknight.train.history import Epoch


class TensorBoard:
    """Hears of a training and writes loss and learning rate of every step, accuracy and seconds of every epoch."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "curves need TensorBoard, which is not installed. Run: pip install 'darknight[tensorboard]'"
            ) from error
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DarKnightError(f"cannot write to {folder}: {error.strerror}. Choose another folder.") from error
        self._folder = folder
        self._make = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._begin = 0.0
        self._steps = 0

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def started(self, *, epochs: int, steps: int, done: int) -> None:
        # What a training wrote after the checkpoint that it is resumed from is not shown.
        self._writer = self._make(str(self._folder), purge_step=done + 1 if done else None)
        self._begin, self._steps = time.perf_counter(), done

    def step(self, *, epoch: int, step: int, loss: float, learning_rate: float) -> None:
        now = time.perf_counter()
        self._add("step", step, {"loss": loss, "learning_rate": learning_rate, "seconds": now - self._begin})
        self._begin, self._steps = now, step

    def epoch(self, epoch: Epoch) -> None:
        values = {"loss": epoch.loss, "accuracy": epoch.accuracy, "seconds": epoch.seconds}
        self._add("epoch", self._steps, values)  # on the same axis
        self._begin = time.perf_counter()

    def _add(self, group: str, number: int, values: dict[str, float]) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, number)
