"""What `darknight infer` does: read a model and examples, run it on shares, count what it got right."""

from __future__ import annotations

import csv
import io
import time
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from torch import nn

from darknight import __version__
from darknight.cli.progress import Display
from darknight.cli.scheme_options import scheme_words
from darknight.cli.training import Hands
from darknight.coding import Scheme
from darknight.data import Examples, read_examples
from darknight.errors import DataError, UsageError
from darknight.nn import protect_, unprotect_
from darknight.runtime import Runtime
from darknight.train import Card, check_tensors, plain, predict, prediction_rows, read_model

_RANKS = 5  # of the second accuracy
_FORMATS = (".csv", ".json")


@dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    """Everything that decides what an inference does."""

    checkpoint: Path
    data: str
    scheme: Scheme
    hands: Hands
    batch_size: int | None = None
    top: int = _RANKS
    output: Path | None = None

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UsageError(f"--top {self.top}; needs a whole number of at least 1.")
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"--batch-size {self.batch_size}; needs a whole number of at least 1.")
        if self.output is not None and self.output.suffix.lower() not in _FORMATS:
            raise UsageError(f"--output {self.output}; needs a name that ends in {' or '.join(_FORMATS)}.")


@dataclass(frozen=True, eq=False)
class Inputs:
    """A model with its weights, what it is, the file that they came from, and the examples."""

    model: nn.Module
    card: Card
    file: Path
    examples: Examples


def read_inputs(settings: InferenceSettings) -> Inputs:
    """Everything is looked at before anything is started or written."""
    settings.hands.look()
    tensors, card, file = read_model(settings.checkpoint)
    if card.normalisation is None:
        raise DataError(f"{file}: it does not say how examples were normalised. Use one that `darknight train` wrote.")
    model = card.network(seed=0)
    check_tensors(model, tensors, file)
    model.load_state_dict(tensors)
    square = len(card.shape) == 3 and card.shape[1] == card.shape[2]
    examples = read_examples(
        settings.data,
        normalisation=card.normalisation,
        label_names=card.label_names,
        image_size=card.shape[1] if square else None,
    )
    if examples.shape != card.shape:
        raise DataError(f"{settings.data}: examples of shape {examples.shape}; the model was trained on {card.shape}.")
    if not len(examples):
        raise DataError(f"{settings.data}: no examples.")
    return Inputs(model, card, file, examples)


def run_inference(
    settings: InferenceSettings, given: Inputs, display: Display
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and a row for each example, ready for JSON."""
    scheme, examples, model = settings.scheme, given.examples, given.model
    rows: list[dict[str, Any]] = []
    known = right = among = 0
    seconds, begin = 0.0, time.perf_counter()
    with display.stage(settings.hands.stage(scheme)):
        fleet = settings.hands.open(scheme)
    with fleet, Runtime(scheme, fleet) as runtime:
        protect_(model, runtime)
        try:
            with display.count("examples", len(examples)) as more:
                for batch in predict(model, examples, top=max(settings.top, _RANKS), batch_size=settings.batch_size):
                    rows += prediction_rows(batch, examples.place, given.card.label_names, top=settings.top)
                    hits = batch.classes == batch.labels[:, None]
                    known += int((batch.labels >= 0).sum())
                    right += int(hits[:, 0].sum())
                    among += int(hits[:, :_RANKS].sum())
                    seconds += batch.seconds
                    more(len(batch.labels))
        finally:
            unprotect_(model)
        summary = {
            "version": __version__,
            "checkpoint": str(given.file),
            "model": given.card.model,
            "data": settings.data,
            "scheme": scheme_words(scheme),
            "fleet": settings.hands.words(fleet),
            "examples": len(examples),
            "labelled": known,
            "accuracy": {"top_1": right / known, "top_5": among / known} if known else None,
            "seconds": seconds,
            "examples_per_second": len(examples) / seconds,
            "total_seconds": time.perf_counter() - begin,
            **runtime.ledger.summary(),
            "file": None,
        }
    return plain(summary), rows


def predictions_file(path: Path, rows: list[dict[str, Any]], summary: dict[str, Any]) -> bytes:
    """The predictions in the format that the name of the file asks for."""
    if path.suffix.lower() == ".json":
        return f"{dumps({'summary': summary, 'predictions': rows}, indent=1)}\n".encode()
    page, ranks = io.StringIO(), len(rows[0]["classes"])
    table = csv.writer(page)
    names = [f"{what}_{rank}" for rank in range(1, ranks + 1) for what in ("class", "probability")]
    table.writerow(["example", "label", *names])
    for row in rows:
        found = [text for one in row["classes"] for text in (one["class"], f"{one['probability']:.6f}")]
        table.writerow([row["example"], "" if row["label"] is None else row["label"], *found])
    return page.getvalue().encode()
