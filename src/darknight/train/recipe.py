"""The recipe: everything that decides how a model is trained, apart from the model, the data and the masking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from darknight.data import Augmentation
from darknight.errors import UsageError

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "step", "one-cycle")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. Checked at construction: what makes no sense is refused in words.

    momentum and nesterov are of SGD; Adam and AdamW have their usual 0.9 and 0.999. weight_decay spares biases and the
    parameters of normalisation layers. schedule: what becomes of learning_rate, see darknight.train.schedules;
    warmup_epochs rise to it in a straight line, step_epochs and step_factor are of the schedule "step".
    clip: the largest norm of a gradient, all parameters together. early_stop: after so many epochs without a better
    accuracy. seed: of the order of batches, augmentation and dropout.

    >>> Recipe(epochs=3, batch_size=64, learning_rate=0.05).optimizer
    'sgd'
    """

    epochs: int
    batch_size: int
    learning_rate: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_epochs: int = 0
    step_epochs: int = 30
    step_factor: float = 0.1
    clip: float | None = None
    label_smoothing: float = 0.0
    augment: Augmentation | None = None
    seed: int = 0
    early_stop: int | None = None

    def __post_init__(self) -> None:
        _choice("optimizer", self.optimizer, OPTIMIZERS)
        _choice("schedule", self.schedule, SCHEDULES)
        for name, whole, least in (
            ("epochs", self.epochs, 1),
            ("batch size", self.batch_size, 1),
            ("warmup epochs", self.warmup_epochs, 0),
            ("step epochs", self.step_epochs, 1),
            ("early stop", 1 if self.early_stop is None else self.early_stop, 1),
        ):
            if not _is_whole(whole) or whole < least:
                raise UsageError(f"{name} {whole}; needs a whole number of at least {least}.")
        _number("learning rate", self.learning_rate, above=0)
        _number("momentum", self.momentum, least=0, below=1)
        _number("weight decay", self.weight_decay, least=0)
        _number("step factor", self.step_factor, above=0, most=1)
        _number("label smoothing", self.label_smoothing, least=0, below=1)
        if self.clip is not None:
            _number("clip", self.clip, above=0)
        if not _is_whole(self.seed) or not 0 <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed}; needs a whole number from 0 to 2^63 - 1.")
        self._check_together()

    def _check_together(self) -> None:
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise UsageError(
                "nesterov is for the optimizer sgd with momentum above 0. Drop it, or change the optimizer."
            )
        if self.warmup_epochs and self.schedule == "one-cycle":
            raise UsageError("warmup epochs with the schedule one-cycle, which has a warmup of its own. Drop them.")
        if self.warmup_epochs >= self.epochs:
            raise UsageError(f"warmup epochs {self.warmup_epochs} of {self.epochs} epochs in all; needs fewer.")

    def words(self) -> dict[str, Any]:
        """The recipe as plain values for a JSON object."""
        return asdict(self)

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> Recipe:
        """The recipe that `words()` came from; UsageError for anything else."""
        known = {field.name for field in fields(cls)}
        if words.keys() != known:
            odd = sorted(words.keys() ^ known)
            raise UsageError(f"a recipe with unknown or missing entries: {', '.join(odd)}.")
        augment = words["augment"]
        for field in fields(cls):
            if isinstance(words[field.name], bool) != (field.name == "nesterov"):
                raise UsageError(f"a recipe whose {field.name} is of the wrong kind.")
        try:
            return cls(**{**words, "augment": None if augment is None else _augmentation(augment)})
        except TypeError as error:
            raise UsageError(f"a recipe with a value of the wrong kind ({error}).") from error


def _augmentation(words: object) -> Augmentation:
    if not isinstance(words, Mapping):
        raise UsageError("a recipe whose augment is of the wrong kind.")
    crop = words.get("resized_crop")
    return Augmentation(**{**words, "resized_crop": None if crop is None else tuple(crop)})


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} {value!r}; use one of {', '.join(known)}.")


def _number(
    name: str,
    value: float,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    fits = (
        math.isfinite(value)
        and (least is None or value >= least)
        and (above is None or value > above)
        and (below is None or value < below)
        and (most is None or value <= most)
    )
    if not fits:
        words = [
            f"{text} {limit:g}"
            for text, limit in (("at least", least), ("above", above), ("below", below), ("at most", most))
            if limit is not None
        ]
        raise UsageError(f"{name} {value:g}; needs a finite number {' and '.join(words)}.")
