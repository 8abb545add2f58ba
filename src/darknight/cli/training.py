"""What `darknight train` does: train in the clear, train on shares, look at what one worker saw."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from darknight import __version__
from darknight.accounting import check_budget
from darknight.audit import best_linear_decoder, record_worker_view
from darknight.cli.enclave_identity import enclave_identity
from darknight.cli.progress import Display
from darknight.cli.scheme_options import scheme_words
from darknight.coding import Field, Scheme
from darknight.data import Dataset, read_dataset
from darknight.errors import UsageError
from darknight.fleet import Fleet, local_fleet
from darknight.fleet.file import read_fleet_file
from darknight.fleet.remote import connect
from darknight.nn.report import MASKED
from darknight.ops.place import STRUCTURE, check_place
from darknight.report import shares_picture
from darknight.runtime import Runtime
from darknight.train import Card, Checkpoint, History, Recipe, Saving, Store, TensorBoard, fit, plain, protected

_WATCHED = 0  # the worker in the picture
_COLUMNS = 8
_MOST_SEEN, _MOST_VALUES, _FEWEST_SEEN = 1437, 1 << 20, 64  # images for the picture, and values of all of them

log = logging.getLogger("darknight")


@dataclass(frozen=True, kw_only=True)
class Hands:
    """Whose hands do the work. file: the fleet file; None for workers on this machine."""

    file: Path | None = None
    insecure_one_operator: bool = False
    patience: float | None = None

    def __post_init__(self) -> None:
        if self.patience is not None and not 0 < self.patience < math.inf:
            raise UsageError(f"--patience {self.patience:g}; needs seconds, more than 0.")
        if self.insecure_one_operator and self.file is None:
            raise UsageError(
                "--insecure-one-operator is for --fleet; workers of this machine are a simulation. Drop it."
            )

    def look(self) -> None:
        """Find a bad fleet file before anything is started or written."""
        if self.file is not None:
            read_fleet_file(self.file)

    def stage(self, scheme: Scheme) -> str:
        return "connecting to the fleet" if self.file else f"starting {scheme.workers} workers"

    def open(self, scheme: Scheme) -> Fleet:
        if self.file is None:
            return local_fleet(scheme, patience=self.patience)
        enclave_identity(read_fleet_file(self.file).identity)  # connect would make it without a word
        return connect(self.file, insecure_one_operator=self.insecure_one_operator, patience=self.patience)

    def words(self, fleet: Fleet) -> dict[str, Any]:
        """The fleet as plain values for a JSON object."""
        workers = [{"name": name, "operator": who} for name, who in zip(fleet.names, fleet.operators, strict=True)]
        return {
            "file": self.file and str(self.file),
            "workers": workers,
            "insecure_one_operator": fleet.insecure_one_operator,
        }


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what a training does. hands: where the workers are.

    description: of a model that has no name; `model` is that of its file then. augment: whether to change training
    images as is usual for the data; `recipe` has it once the data is read. place: where products are computed. flags:
    what the user asked for, as plain values, for a resume.
    """

    model: str
    data: str
    scheme: Scheme
    recipe: Recipe
    clear: bool
    augment: bool = False
    hands: Hands
    leakage_budget: float | None = None
    place: str = STRUCTURE
    test_share: float | None = None
    image_size: int | None = None
    picture: bool = True
    save_every: float = 60.0
    tensorboard: Path | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.save_every < math.inf:
            raise UsageError(f"--save-every {self.save_every:g}; needs seconds, 0 for every step.")
        check_place(self.place)
        check_budget(self.leakage_budget, self.scheme, one_operator=self.hands.insecure_one_operator)


def read_and_build(settings: Settings) -> tuple[Settings, Dataset, nn.Module]:
    """The data and a new model, before anything is started or written; a bad fleet file is found here too.

    The settings come back with the augmentation that is usual for the data, if that is wanted.
    """
    settings.hands.look()
    seed = settings.recipe.seed
    data = read_dataset(settings.data, seed=seed, test_share=settings.test_share, image_size=settings.image_size)
    if settings.augment:
        if data.augmentation is None:
            raise UsageError(f"--augment: nothing is usual for {data.name}. Drop it.")
        settings = replace(settings, recipe=replace(settings.recipe, augment=data.augmentation))
    return settings, data, Card.of(settings.model, data, settings.description).network(seed=seed)


def run_training(
    settings: Settings, data: Dataset, private: nn.Module, store: Store, resume: Checkpoint | None, display: Display
) -> tuple[dict[str, Any], bytes | None]:
    """The summary, ready for JSON, and the picture as a PNG, if there can be one."""
    clear, history, ledger, layers, hands = _train(private, data, settings, store, resume, display)
    picture, view = None, None
    sent = any(layer["where"] == MASKED for layer in layers)
    if (count := _images_for_picture(settings, data)) and sent:
        with display.stage("looking at what one worker saw"):
            picture, view = _picture(private, data, settings, count)
    waiting = ledger["time"]["waiting_seconds"]
    recipe = settings.recipe
    summary = {
        "version": __version__,
        "settings": {
            "model": settings.model,
            "data": settings.data,
            "epochs": recipe.epochs,
            "batch_size": recipe.batch_size,
            "learning_rate": recipe.learning_rate,
            "seed": recipe.seed,
            "recipe": recipe.words(),
            "scheme": scheme_words(settings.scheme),
            "place": settings.place,
        },
        "fleet": hands,
        "examples": {"train": len(data.train), "test": len(data.test)},
        "clear": clear,
        "private": {
            **history.words(),
            "resumed_at_step": resume and resume.step,
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
    return plain(summary), picture


def _train(
    model: nn.Module, data: Dataset, settings: Settings, store: Store, resume: Checkpoint | None, display: Display
) -> tuple[dict[str, Any] | None, History, dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """In the clear if that is wanted, then on shares: both histories, the ledger, the layers, the fleet."""
    scheme, recipe = settings.scheme, settings.recipe
    with ExitStack() as stack:
        curves = [stack.enter_context(TensorBoard(settings.tensorboard))] if settings.tensorboard else []
        # Before the training in the clear: whoever waits for that should not learn afterwards that a worker is missing.
        with display.stage(settings.hands.stage(scheme)):
            fleet = stack.enter_context(settings.hands.open(scheme))
            made = Runtime(scheme, fleet, seed=recipe.seed, leakage_budget=settings.leakage_budget)
            runtime = stack.enter_context(made)
        clear = None
        if resume is not None:
            clear = resume.extra.get("clear")
        elif settings.clear:
            clear = fit(copy.deepcopy(model), data, recipe, progress=[display.training("clear")]).words()
        saving = Saving(
            store=store,
            card=Card.of(settings.model, data, settings.description),
            every=settings.save_every,
            extra={"flags": dict(settings.flags), "clear": clear},
        )
        batch = (min(recipe.batch_size, len(data.train)), *data.shape)
        with protected(model, runtime, place=settings.place, batch=batch) as layers:
            history = fit(
                model,
                data,
                recipe,
                runtime=runtime,
                saving=saving,
                resume=resume,
                progress=[display.training("private"), *curves],
            )
        log.info("ledger\n%s", runtime.ledger)
        return clear, history, runtime.ledger.summary(), layers, settings.hands.words(fleet)


def _images_for_picture(settings: Settings, data: Dataset) -> int:
    """How many images a decoder is shown; 0 if there is no picture to be had, or none in reasonable time."""
    count = min(_MOST_SEEN, len(data.train), _MOST_VALUES // math.prod(data.shape))
    return count if settings.picture and len(data.shape) == 3 and count >= _FEWEST_SEEN else 0


def _picture(model: nn.Module, data: Dataset, settings: Settings, count: int) -> tuple[bytes, dict[str, Any]]:
    """Training images once more through a fleet that records, and what a linear decoder makes of a worker's shares."""
    scheme = settings.scheme
    view = record_worker_view(model, data.train.examples(torch.arange(count)), scheme, worker=_WATCHED)
    prime = scheme.arithmetic.prime if isinstance(scheme.arithmetic, Field) else None
    rebuilt = best_linear_decoder(view.shares, view.images, prime=prime, seed=settings.recipe.seed)
    shown = rebuilt.examples[:_COLUMNS]
    picture = shares_picture(
        view.images[shown],
        view.shares[shown],
        rebuilt.images[:_COLUMNS],
        worker=view.worker,
        correlation=rebuilt.correlation,
    )
    return picture, {"worker": view.worker, "layer": view.layer, "correlation": rebuilt.correlation}
