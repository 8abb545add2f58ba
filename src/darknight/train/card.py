"""The card of a model: what it takes and what it tells apart. It travels with the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from darknight.data import Dataset, Normalisation
from darknight.errors import DarKnightError, DataError, UsageError
from darknight.models import build_described, build_model

_LATER = "description"  # a field that files of the first versions do not have


@dataclass(frozen=True, kw_only=True)
class Card:
    """model: its name in the registry, or of the file with its description, which is `description` then
    (models.described). shape: of one example. data: the name of the set; its sizes; and `labels`, a digest of its
    training labels, by which another split or another set of the same size is noticed.
    """

    model: str
    shape: tuple[int, ...]
    classes: int
    data: str
    train_examples: int
    test_examples: int
    labels: str
    label_names: tuple[str, ...] | None = None
    normalisation: Normalisation | None = None
    description: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, model: str, data: Dataset, description: Mapping[str, Any] | None = None) -> Card:
        return cls(
            model=model,
            description=description,
            shape=tuple(data.shape),
            classes=data.classes,
            data=data.name,
            train_examples=len(data.train),
            test_examples=len(data.test),
            labels=hashlib.sha256(data.train.labels.contiguous().numpy().data).hexdigest(),
            label_names=data.label_names,
            normalisation=data.normalisation,
        )

    def network(self, *, seed: int) -> nn.Module:
        """A new model of this kind."""
        if self.description is not None:
            return build_described(self.description, shape=self.shape, classes=self.classes, seed=seed)
        return build_model(self.model, shape=self.shape, classes=self.classes, seed=seed)

    def words(self) -> dict[str, Any]:
        """The card as plain values for a JSON object. Earlier versions, which know no descriptions, read it too."""
        found = asdict(self)
        return found if self.description is not None else {name: found[name] for name in found if name != _LATER}

    @classmethod
    def from_words(cls, words: object, path: Path) -> Card:
        """The card that `words()` came from; DataError, with the file's name, for anything else."""
        try:
            if not isinstance(words, Mapping) or words.keys() | {_LATER} != {field.name for field in fields(cls)}:
                raise TypeError
            if not isinstance(words.get(_LATER), dict | None):
                raise TypeError
            normalisation, names = words["normalisation"], words["label_names"]
            card = cls(
                **{
                    **words,
                    "shape": tuple(words["shape"]),
                    "label_names": None if names is None else tuple(names),
                    "normalisation": None if normalisation is None else Normalisation(**normalisation),
                }
            )
            counts = (*card.shape, card.classes, card.train_examples, card.test_examples)
            texts = (card.model, card.data, card.labels, *(card.label_names or ()))
            if not all(type(count) is int and count > 0 for count in counts):
                raise TypeError
            if not all(isinstance(text, str) for text in texts) or len(card.label_names or texts) < 1:
                raise TypeError
        except (TypeError, ValueError, DarKnightError) as error:
            raise DataError(f"{path}: its description of the model is damaged. Take another one.") from error
        return card

    def check_same(self, other: Card, path: Path) -> None:
        """Refuse to go on with another model or other data than `path` is of (`other`)."""
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(other, field.name)
            if now != then:
                words = field.name.replace("_", " ")
                shown = f" ({then} there, {now} here)" if isinstance(now, int | str) and field.name != "labels" else ""
                raise UsageError(
                    f"{path} is of another training: its {words} differ{shown}. "
                    "Use the same model and data, or start anew in another folder."
                )
