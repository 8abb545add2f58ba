"""A trained model at work: the most probable classes of every example, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from darknight.data import Part
from darknight.errors import UsageError
from darknight.train.batches import evaluation_batch


@dataclass(frozen=True, eq=False)
class Predictions:
    """Of one batch: (example, rank) classes and their probabilities, the first rank the most probable.

    first: the number of the batch's first example. labels: -1 where none is known. seconds: of the model alone.
    """

    first: int
    labels: Tensor
    classes: Tensor
    probabilities: Tensor
    seconds: float


def prediction_rows(
    batch: Predictions, place: Callable[[int], object], names: Sequence[str] | None, *, top: int
) -> list[dict[str, Any]]:
    """A row for each example, plain values. place: what it is called, by its number. names: of the classes."""

    def name(number: int) -> str | int | None:
        return None if number < 0 else names[number] if names else number

    return [
        {
            "example": place(batch.first + index),
            "label": name(label),
            "classes": [
                {"class": name(number), "probability": probability}
                for number, probability in zip(classes[:top], probabilities[:top], strict=True)
            ],
        }
        for index, (label, classes, probabilities) in enumerate(
            zip(batch.labels.tolist(), batch.classes.tolist(), batch.probabilities.tolist(), strict=True)
        )
    ]


def predict(model: nn.Module, part: Part, *, top: int, batch_size: int | None = None) -> Iterator[Predictions]:
    """Run `model` over all examples, in their order. Its training mode is restored at the end."""
    if top < 1:
        raise UsageError(f"top {top}; needs a whole number of at least 1.")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch size {batch_size}; needs a whole number of at least 1.")
    was_training = model.training
    model.eval()
    try:
        for chosen in torch.split(torch.arange(len(part)), batch_size or evaluation_batch(part.shape)):
            examples = part.examples(chosen)
            begin = time.perf_counter()
            with torch.no_grad():
                scores = model(examples)
            seconds = time.perf_counter() - begin
            found = scores.double().softmax(dim=1).topk(min(top, scores.shape[1]), dim=1)
            yield Predictions(int(chosen[0]), part.labels[chosen], found.indices, found.values, seconds)
    finally:
        model.train(was_training)
