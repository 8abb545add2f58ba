"""One job, from its keys to its sealed result. Data and labels are in this process's memory alone, while it lasts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Any

from torch import Tensor

from darknight.data import Dataset, Examples, Part, Unlabelled, labels_for
from darknight.errors import DarKnightError, DataError, TrustError, UsageError
from darknight.fleet.fleet import Fleet
from darknight.runtime import Runtime
from darknight.service.queue import RESULT, WEIGHTS, Entry, in_words
from darknight.service.sealed_data import open_dataset, open_either
from darknight.service.sealed_store import BEST, SealedStore
from darknight.train import (
    Card,
    Epoch,
    Recipe,
    Saving,
    check_tensors,
    fit,
    plain,
    predict,
    prediction_rows,
    protected,
    tensors_as_bytes,
    tensors_from_bytes,
)
from darknight.trust.blob import open_bytes, seal_bytes
from darknight.trust.bundle import packed
from darknight.trust.durable import write_durably
from darknight.trust.release import JobKeys, Receipt

MODEL, SUMMARY, PREDICTIONS = "model.safetensors", "summary.json", "predictions.json"
_ROW, _NUMBER = 128, 8  # bytes of a prediction's text without the name of its class, at most; and of a class's number
_OFTEN = 0.5  # seconds between two events about steps


class Cancelled(DarKnightError):  # noqa: N818 - no error: the client wished it
    """The client does not want the job any more."""


def run_job(entry: Entry, open_fleet: Callable[[], Fleet]) -> None:
    """Do the job and write its result. Errors say what to do; Cancelled if the client wished so.

    open_fleet: connects to the workers.

    Guarantees: what it writes to the disk is sealed under the job's key; what it sends to workers is shares and weights
        (contract test: tests/service/test_no_plaintext.py). A job that goes on from a checkpoint ends with the weights
        of one that was never stopped, bit for bit in the field (contract test: tests/service/test_kill.py).
    """
    if entry.keys is None:
        raise TrustError("the job has no keys.", check="keys")
    weights, manifest = _weights(entry, entry.keys), bytes.fromhex(entry.text.data)
    if entry.job.recipe is not None:
        data = open_dataset(entry.data, entry.keys.data, manifest=manifest)
        with open_fleet() as fleet:
            files = _train(entry, entry.keys, entry.job.recipe, data, weights, fleet)
    elif weights is not None:
        either = open_either(entry.data, entry.keys.data, manifest=manifest)
        with open_fleet() as fleet:
            files = _infer(entry, either, weights, fleet)
    sealed = seal_bytes(entry.keys.derived("result"), packed(files), label=f"{entry.name} result".encode())
    with in_words(entry.folder):
        write_durably(entry.folder / RESULT, sealed)


def _train(
    entry: Entry,
    keys: JobKeys,
    recipe: Recipe,
    data: Dataset,
    weights: tuple[dict[str, Tensor], dict[str, Any]] | None,
    fleet: Fleet,
) -> dict[str, bytes]:
    if entry.text.augment:
        if data.augmentation is None:
            raise UsageError("augment: nothing is usual for these data. Leave it out.")
        recipe = dataclasses.replace(recipe, augment=data.augmentation)
    card = _card(entry, data)
    model = card.network(seed=recipe.seed)
    if weights is not None:
        check_tensors(model, weights[0], Path(WEIGHTS))
        model.load_state_dict(weights[0])

    def written(receipt: Receipt) -> None:
        entry.events.add("checkpoint", receipt=receipt.words())

    store = SealedStore(entry.folder, keys.derived("checkpoint"), job=entry.name, receipt=written)
    resume = None if entry.resume is None else store.open(entry.resume)
    begin = time.monotonic()
    with Runtime(entry.job.scheme, fleet, seed=recipe.seed, leakage_budget=entry.text.leakage_budget) as runtime:
        with protected(model, runtime) as layers:
            history = fit(
                model,
                data,
                recipe,
                runtime=runtime,
                saving=Saving(store=store, card=card, every=entry.text.save_every),
                resume=resume,
                progress=[_Reporter(entry, runtime)],
            )
        summary = {
            "job": entry.name,
            "resumed_at_step": resume and resume.step,
            "seconds_since_start": time.monotonic() - begin,
            **history.words(),
            "layers": layers,
            "ledger": runtime.ledger.summary(),
        }
    steps = {"card": card.words(), "epoch": recipe.epochs, "accuracy": history.accuracy}
    final, _ = tensors_as_bytes(model.state_dict(), steps)
    files = {MODEL: final, SUMMARY: _json(summary)}
    return files if store.best is None else {**files, BEST: store.best}


def _infer(
    entry: Entry, data: Dataset | Unlabelled, weights: tuple[dict[str, Tensor], dict[str, Any]], fleet: Fleet
) -> dict[str, bytes]:
    card = Card.from_words(weights[1].get("card"), Path(WEIGHTS))
    if card.normalisation is None or card.shape != data.shape:
        raise DataError(f"examples of shape {data.shape}; the weights are of a model for {card.shape}.")
    model = card.network(seed=0)
    check_tensors(model, weights[0], Path(WEIGHTS))
    model.load_state_dict(weights[0])
    rows: list[dict[str, Any]] = []
    known = right = 0
    parts = _chosen(entry.text.part, data, card)
    total = sum(map(len, parts))
    with Runtime(entry.job.scheme, fleet) as runtime, protected(model, runtime):
        reporter = _Reporter(entry, runtime)
        for part in parts:
            before = len(rows)
            for batch in predict(model, part, top=entry.text.top):
                rows += prediction_rows(batch, before.__add__, card.label_names, top=entry.text.top)
                known += int((batch.labels >= 0).sum())
                right += int((batch.classes[:, 0] == batch.labels).sum())
                reporter.predicted(len(rows), total)
        ledger = runtime.ledger.summary()
    # Padded by what is known beforehand: the size of the sealed result must not say which class it is.
    accuracy = {"labelled": known, "accuracy": right / known} if known else {}
    summary = {"job": entry.name, "examples": len(rows), **accuracy, "ledger": ledger}
    longest = max((len(dumps(name)) for name in card.label_names or ()), default=_NUMBER)
    predictions = _json({"predictions": rows}).ljust(_ROW + total * (1 + entry.text.top) * (_ROW + longest))
    return {PREDICTIONS: predictions, SUMMARY: _json(summary)}


def _chosen(part: str, data: Dataset | Unlabelled, card: Card) -> list[Examples]:
    """Normalised as the model learnt it, whatever these data would suggest, with its numbers for the classes."""
    assert card.normalisation is not None
    parts: dict[str, tuple[Part | None, ...]]
    parts = {"train": (data.train,), "test": (data.test,), "all": (data.train, data.test)}
    found = []
    for one in parts[part]:
        if isinstance(one, Examples):
            labels = labels_for(card.label_names, one.labels, data.label_names, "the data")
            if int(labels.max()) >= card.classes:
                raise DataError("the data have classes that the model does not know. Use weights of a model that does.")
            found.append(dataclasses.replace(one, labels=labels, normalisation=card.normalisation))
    if not found:
        raise UsageError(
            f'part = "{part}": the data have one part, for want of labels. Leave it out: that is all of it.'
        )
    return found


def _card(entry: Entry, data: Dataset) -> Card:
    """By name, or as the client described it."""
    named = entry.text.model
    return Card.of(named["name"], data) if "name" in named else Card.of("described", data, dict(named))


def _weights(entry: Entry, keys: JobKeys) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    if entry.text.weights is None:
        return None
    with in_words(entry.folder):
        sealed = (entry.folder / WEIGHTS).read_bytes()
    opened = open_bytes(keys.derived("weights"), sealed, label=f"{entry.text.salt} weights".encode())
    tensors, words, _ = tensors_from_bytes(opened, Path(WEIGHTS))
    return tensors, words


def _json(words: dict[str, Any]) -> bytes:
    return f"{dumps(plain(words), indent=1)}\n".encode()


class _Reporter:
    """A `train.Progress` that tells the client, and stops when it wished so."""

    def __init__(self, entry: Entry, runtime: Runtime) -> None:
        self._entry, self._runtime = entry, runtime
        self._told = 0.0
        self._blamed = 0

    def started(self, *, epochs: int, steps: int, done: int) -> None:
        self._entry.events.add("started", epochs=epochs, steps=steps, done=done)

    def step(self, *, epoch: int, step: int, loss: float, learning_rate: float) -> None:
        self._integrity()
        if time.monotonic() - self._told >= _OFTEN:
            self._told = time.monotonic()
            self._entry.events.add("step", epoch=epoch, step=step, loss=loss, learning_rate=learning_rate)

    def epoch(self, epoch: Epoch) -> None:
        ledger = plain(self._runtime.ledger.summary())
        self._entry.events.add("epoch", **dataclasses.asdict(epoch), ledger=ledger)

    def predicted(self, done: int, examples: int) -> None:
        self._integrity()
        self._entry.events.add("predicted", done=done, examples=examples)

    def _integrity(self) -> None:
        if self._entry.cancelled:
            raise Cancelled("cancelled by its client")
        blamed = self._runtime.ledger.blamed
        for event in blamed[self._blamed :]:
            words = {**dataclasses.asdict(event), "kind": event.kind.value}
            self._entry.events.add("integrity", evidence=words)
        self._blamed = len(blamed)
