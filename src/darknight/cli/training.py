"""What `darknight train` does: train in the clear, train on shares, look at what one worker saw."""

from __future__ import annotations

import copy
import logging
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from darknight import __version__
from darknight.audit import best_linear_decoder, record_worker_view
from darknight.cli.enclave import enclave_identity
from darknight.cli.progress import Display
from darknight.cli.scheme_options import scheme_words
from darknight.coding import Field, Scheme
from darknight.data import Dataset, read_dataset
from darknight.errors import UsageError
from darknight.fleet import Fleet, local_fleet
from darknight.fleet.file import read_fleet_file
from darknight.fleet.remote import connect
from darknight.models import build_model
from darknight.nn import protect_, unprotect_
from darknight.report import shares_picture
from darknight.runtime import Runtime
from darknight.train import History, Progress, check_settings, fit

_WATCHED = 0  # the worker in the picture
_COLUMNS = 8

log = logging.getLogger("darknight")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what a training does. fleet: the fleet file; None for workers on this machine."""

    model: str
    data: str
    scheme: Scheme
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int
    clear: bool
    fleet: Path | None = None
    insecure_one_operator: bool = False
    patience: float | None = None

    def __post_init__(self) -> None:
        check_settings(self.epochs, self.batch_size, self.learning_rate, self.seed)
        if self.patience is not None and not 0 < self.patience < math.inf:
            raise UsageError(f"--patience {self.patience:g}; needs seconds, more than 0.")
        if self.insecure_one_operator and self.fleet is None:
            raise UsageError(
                "--insecure-one-operator is for --fleet; workers of this machine are a simulation. Drop it."
            )


def read_and_build(settings: Settings) -> tuple[Dataset, nn.Module]:
    """The data and a new model, before anything is started or written; a bad fleet file is found here too."""
    if settings.fleet is not None:
        read_fleet_file(settings.fleet)
    data = read_dataset(settings.data, seed=settings.seed)
    return data, build_model(settings.model, shape=data.shape, classes=data.classes, seed=settings.seed)


def run_training(
    settings: Settings, data: Dataset, private: nn.Module, display: Display
) -> tuple[dict[str, Any], bytes]:
    """The summary, ready for JSON, and the picture as a PNG."""
    clear, history, ledger, layers, hands = _train(private, data, settings, display)
    with display.stage("looking at what one worker saw"):
        picture, view = _picture(private, data, settings)
    waiting = ledger["time"]["waiting_seconds"]
    summary = {
        "version": __version__,
        "settings": {
            "model": settings.model,
            "data": settings.data,
            "epochs": settings.epochs,
            "batch_size": settings.batch_size,
            "learning_rate": settings.learning_rate,
            "seed": settings.seed,
            "scheme": scheme_words(settings.scheme),
        },
        "fleet": hands,
        "examples": {"train": len(data.train_x), "test": len(data.test_x)},
        "clear": clear and _history_words(clear),
        "private": {
            **_history_words(history),
            **ledger,
            "time": {
                "total_seconds": history.seconds,
                **ledger["time"],
                # All that this process did while it did not wait: masking, checks, and the layers that stay here.
                "enclave_seconds": max(0.0, history.seconds - waiting),
            },
            "layers": layers,
        },
        "view": view,
    }
    return _plain(summary), picture


def _fit(model: nn.Module, data: Dataset, settings: Settings, progress: Progress) -> History:
    return fit(
        model,
        data,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        progress=progress,
    )


def _train(
    model: nn.Module, data: Dataset, settings: Settings, display: Display
) -> tuple[History | None, History, dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """In the clear if that is wanted, then on shares: both histories, the ledger, the layers, the fleet."""
    scheme = settings.scheme
    with ExitStack() as stack:
        # Before the training in the clear: whoever waits for that should not learn afterwards that a worker is missing.
        with display.stage("connecting to the fleet" if settings.fleet else f"starting {scheme.workers} workers"):
            fleet = stack.enter_context(_fleet(settings))
            runtime = stack.enter_context(Runtime(scheme, fleet, seed=settings.seed))
        clear = _fit(copy.deepcopy(model), data, settings, display.training("clear")) if settings.clear else None
        report = protect_(model, runtime)
        try:
            history = _fit(model, data, settings, display.training("private"))
        finally:
            unprotect_(model)
        log.info("layers\n%s", report)
        log.info("ledger\n%s", runtime.ledger)
        layers = [asdict(row) for row in report.rows]
        return clear, history, runtime.ledger.summary(), layers, _fleet_words(settings, fleet)


def _fleet(settings: Settings) -> Fleet:
    if settings.fleet is None:
        return local_fleet(settings.scheme, patience=settings.patience)
    enclave_identity(read_fleet_file(settings.fleet).identity)  # connect would make it without a word
    return connect(settings.fleet, insecure_one_operator=settings.insecure_one_operator, patience=settings.patience)


def _fleet_words(settings: Settings, fleet: Fleet) -> dict[str, Any]:
    workers = [{"name": name, "operator": who} for name, who in zip(fleet.names, fleet.operators, strict=True)]
    return {
        "file": settings.fleet and str(settings.fleet),
        "workers": workers,
        "insecure_one_operator": fleet.insecure_one_operator,
    }


def _picture(model: nn.Module, data: Dataset, settings: Settings) -> tuple[bytes, dict[str, Any]]:
    """Training images once more through a fleet that records, and what a linear decoder makes of a worker's shares."""
    scheme = settings.scheme
    view = record_worker_view(model, data.train_x, scheme, worker=_WATCHED)
    prime = scheme.arithmetic.prime if isinstance(scheme.arithmetic, Field) else None
    rebuilt = best_linear_decoder(view.shares, view.images, prime=prime, seed=settings.seed)
    shown = rebuilt.examples[:_COLUMNS]
    picture = shares_picture(
        view.images[shown],
        view.shares[shown],
        rebuilt.images[:_COLUMNS],
        worker=view.worker,
        correlation=rebuilt.correlation,
    )
    return picture, {"worker": view.worker, "layer": view.layer, "correlation": rebuilt.correlation}


def _history_words(history: History) -> dict[str, Any]:
    return {
        "accuracy": history.accuracy,
        "loss": history.loss,
        "seconds": history.seconds,
        "epochs": [
            {"loss": epoch.loss, "accuracy": epoch.accuracy, "seconds": epoch.seconds} for epoch in history.epochs
        ],
    }


def _plain(value: Any) -> Any:
    """The same with null for numbers that JSON has no word for: a leakage without a bound is infinite."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
