"""What a training did, epoch by epoch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Epoch:
    """One pass over the training examples: its mean loss, the test accuracy after it, its seconds."""

    number: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Best:
    """The first epoch with the highest accuracy."""

    epoch: int
    accuracy: float


@dataclass(frozen=True)
class History:
    """The epochs, those before a resume too, and the seconds of all of them with their evaluations.

    stopped_early: accuracy had not risen for as long as the recipe allows.
    """

    epochs: tuple[Epoch, ...]
    seconds: float
    stopped_early: bool = False

    def words(self) -> dict[str, Any]:
        """The history as plain values for a JSON object."""
        return {
            "accuracy": self.accuracy,
            "loss": self.loss,
            "seconds": self.seconds,
            "best": asdict(self.best),
            "stopped_early": self.stopped_early,
            "epochs": [
                {"loss": epoch.loss, "accuracy": epoch.accuracy, "seconds": epoch.seconds} for epoch in self.epochs
            ],
        }

    @property
    def accuracy(self) -> float:
        return self.epochs[-1].accuracy

    @property
    def loss(self) -> float:
        return self.epochs[-1].loss

    @property
    def best(self) -> Best:
        best = best_of(self.epochs)
        assert best is not None
        return best


def best_of(epochs: tuple[Epoch, ...]) -> Best | None:
    """None if there is no epoch yet."""
    if not epochs:
        return None
    first = max(epochs, key=lambda epoch: (epoch.accuracy, -epoch.number))
    return Best(first.number, first.accuracy)
