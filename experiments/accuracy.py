"""Accuracy by epoch: training in the clear, under the paper's noise, and in the field (the paper's Figure 3).

Small networks of the paper's three kinds, at most 40 million multiplications an image, on a slice of CIFAR-10 (the
paper: VGG16, ResNet152 and MobileNetV2 on CIFAR-100). All start from the same weights and see the same batches. Each
pair of network and setting is a cell, written when it is complete; a run that was killed goes on where it was.

    python experiments/accuracy.py --out results/accuracy.json
    python experiments/accuracy.py --out /tmp/quick.json --quick         # without CIFAR-10, in a minute

With noise, worker processes on this machine do the products, because their rounding is what is looked at. In the field
results are the same bit for bit without workers (tests/runtime/test_bit_identity.py), so there are none.
"""

from __future__ import annotations

import argparse
import shutil
import time
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from recording import Recording, cifar_slice, digits_slice, run_or_explain
from settings import FIELD, MODELS, TRAINING, chosen, recipe_of, scale_of, training_parser
from torch import nn

import darknight as dk
from darknight.data import Dataset
from darknight.errors import DarKnightError, FleetError, PrivacyWarning, WorkerError
from darknight.models import build_model
from darknight.nn.flops import FlopCounter
from darknight.train import Card, Epoch, Recipe, Saving, Store, fit

_MOST_MMACS = 40


def main() -> None:
    parser = training_parser(__doc__, TRAINING)
    parser.add_argument("--save-every", type=float, default=30.0, help="seconds between checkpoints (default: 30)")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.quick:
        flags.examples, flags.test_examples, flags.epochs = 192, 96, 2
    data = (digits_slice if flags.quick else cifar_slice)(flags.examples, flags.test_examples)
    models, settings = chosen(flags.model, MODELS, "model"), chosen(flags.setting, TRAINING, "setting")
    recipe = recipe_of(flags)
    scale = {**scale_of(data, recipe), "learning_rate": recipe.learning_rate, "schedule": recipe.schedule}
    run = Recording("accuracy", flags.out, scale=scale, planned=[f"{m}/{s}" for s in settings for m in models])
    for name in run.missing:
        model, setting = name.split("/", 1)
        run.add(name, trained(model, setting, data, recipe, flags, run))


class Told:
    """Epochs as they end, with those before a resume."""

    def __init__(self, name: str, run: Recording, epochs: tuple[Epoch, ...]) -> None:
        self._name, self._run, self.epochs = name, run, list(epochs)

    def started(self, *, epochs: int, steps: int, done: int) -> None:
        self._run.tell(f"{self._name}: {'resumed after' if done else 'begins,'} {done or steps} steps")

    def step(self, *, epoch: int, step: int, loss: float, learning_rate: float) -> None:
        pass

    def epoch(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)
        self._run.tell(f"{self._name}: epoch {epoch.number}, accuracy {epoch.accuracy:.3f}, loss {epoch.loss:.3f}")


def trained(
    model: str, setting: str, data: Dataset, recipe: Recipe, flags: argparse.Namespace, run: Recording
) -> dict[str, Any]:
    """One cell. A training that cannot go on (it diverged, or noise left the range of floats) is a result too."""
    network = build_model(model, shape=data.shape, classes=data.classes, seed=recipe.seed)
    mmacs = multiplications(network, data) / 1e6
    if mmacs > _MOST_MMACS:
        raise dk.errors.UsageError(f"{model} takes {mmacs:.0f} million multiplications; at most {_MOST_MMACS}.")
    noise, begun = TRAINING[setting], time.perf_counter()
    folder = flags.out.with_name(f"{flags.out.name}.work") / f"{model} {setting}"
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", PrivacyWarning)  # that the paper's gradients are in the clear is known here
        store = stack.enter_context(Store(folder))
        resume = store.latest()
        told = Told(f"{model}, {setting}", run, resume.epochs if resume else ())
        before = resume.seconds + sum(epoch.seconds for epoch in resume.epochs) if resume else 0.0
        runtime = None
        if setting != "clear":
            scheme = FIELD if noise is None else noise.scheme()
            fleet = None if noise is None else stack.enter_context(dk.local_fleet(scheme))
            runtime = stack.enter_context(dk.Runtime(scheme, fleet, seed=recipe.seed))
            dk.protect_(network, runtime)
        saving = Saving(store=store, card=Card.of(model, data), every=flags.save_every)
        stopped = None
        try:
            fit(network, data, recipe, runtime=runtime, saving=saving, resume=resume, progress=[told])
        except (FleetError, WorkerError):  # no result of the arithmetic
            raise
        except DarKnightError as error:
            stopped = str(error)
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "model": model,
        "setting": setting,
        "noise": noise and noise.words(),
        "mmacs": round(mmacs, 2),
        "epochs": [{"loss": epoch.loss, "accuracy": epoch.accuracy} for epoch in told.epochs],
        "stopped": stopped,
        "seconds": round(before + time.perf_counter() - begun, 1),
    }


def multiplications(network: nn.Module, data: Dataset) -> float:
    """Of one image, forward."""
    network.eval()
    with torch.no_grad(), FlopCounter() as counter:
        network(data.train.examples(torch.arange(1)))
    network.train()
    return counter.flops / 2


if __name__ == "__main__":
    run_or_explain(main)
