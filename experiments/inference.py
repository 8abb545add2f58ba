"""Inference under the noise of the paper's Table 2: accuracy, agreement with the plain model, and what may leak.

Each network is trained once, in the clear, on a slice of CIFAR-10; then the test images go through it in the clear, in
the field and under each noise, by worker processes on this machine. The paper's table has ImageNet, with VGG16,
ResNet152 and MobileNetV1; what is compared is not accuracy but what noise does to it.

    python experiments/inference.py --out results/inference.json
    python experiments/inference.py --out /tmp/quick.json --quick         # without CIFAR-10, in a minute

Leakage is a bound in nats a scalar for inputs within +-C1: what Theorem 1 gives (K=2, squared ratio of coefficients 10,
as in the table); what accounting.leakage gives for the largest of the dense coefficients that were drawn in this run;
and for the systematic code, our default, at the same noise. In the field it is zero.
"""

from __future__ import annotations

import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from recording import Recording, cifar_slice, digits_slice, run_or_explain
from settings import FIELD, MODELS, TABLE_2, Noise, chosen, recipe_of, scale_of, training_parser
from torch import Tensor, nn

import darknight as dk
from darknight.accounting import worst_coalition
from darknight.accounting.theorems import theorem_1
from darknight.coding.systematic import real_systematic
from darknight.data import Dataset, Part
from darknight.errors import DarKnightError, FleetError, WorkerError
from darknight.models import build_model
from darknight.train import Card, Recipe, Saving, Store, fit, predict

_RATIO = 10.0  # of the paper's table: the largest squared coefficient over the smallest
_TOP = 5


def main() -> None:
    flags = training_parser(__doc__, TABLE_2).parse_args()
    torch.set_num_threads(1)
    if flags.quick:
        flags.examples, flags.test_examples, flags.epochs = 512, 96, 3
    data = (digits_slice if flags.quick else cifar_slice)(flags.examples, flags.test_examples)
    models, settings = chosen(flags.model, MODELS, "model"), chosen(flags.setting, TABLE_2, "setting")
    recipe = recipe_of(flags)
    run = Recording(
        "inference", flags.out, scale=scale_of(data, recipe), planned=[f"{m}/{s}" for m in models for s in settings]
    )
    work = flags.out.with_name(f"{flags.out.name}.work")
    for model in models:
        missing = [name for name in run.missing if name.startswith(f"{model}/")]
        if missing:
            network = trained(model, data, recipe, work / model, run)
            plain = ranked(network, data.test)
            for name in missing:
                run.add(name, measured(model, name.partition("/")[2], network, plain, data))
            shutil.rmtree(work / model, ignore_errors=True)


def trained(model: str, data: Dataset, recipe: Recipe, folder: Path, run: Recording) -> nn.Module:
    """In the clear; or what is left to do of it."""
    network = build_model(model, shape=data.shape, classes=data.classes, seed=recipe.seed)
    run.tell(f"{model}: training in the clear")
    with Store(folder) as store:
        saving = Saving(store=store, card=Card.of(model, data), every=30.0)
        found = fit(network, data, recipe, saving=saving, resume=store.latest())
    run.tell(f"{model}: accuracy {found.accuracy:.3f}")
    return network.eval()


def ranked(network: nn.Module, part: Part) -> Tensor:
    """(example, rank): the most probable classes."""
    return torch.cat([batch.classes for batch in predict(network, part, top=_TOP)])


def measured(model: str, setting: str, network: nn.Module, plain: Tensor, data: Dataset) -> dict[str, Any]:
    """One cell."""
    noise, classes, stopped, leaked = TABLE_2[setting], plain, None, 0.0
    if setting != "clear":
        scheme = (FIELD if noise is None else noise.scheme()).for_inference()
        with ExitStack() as stack:
            fleet = stack.enter_context(dk.local_fleet(scheme))
            runtime = stack.enter_context(dk.Runtime(scheme, fleet))
            dk.protect_(network, runtime)
            stack.callback(dk.unprotect_, network)
            try:
                classes = ranked(network, data.test)
            except (FleetError, WorkerError):
                raise
            except DarKnightError as error:
                classes, stopped = torch.full_like(plain, -1), str(error)
            leaked = float(runtime.ledger.accountant.largest)
    hits = classes == data.test.labels[:, None]
    return {
        "model": model,
        "setting": setting,
        "noise": noise and noise.words(),
        "top1": float(hits[:, 0].double().mean()),
        "top5": float(hits.any(1).double().mean()),
        "agreement": float((classes[:, 0] == plain[:, 0]).double().mean()),
        "leakage": None if setting == "clear" else leakage(noise, leaked),
        "stopped": stopped,
    }


def leakage(noise: Noise | None, dense: float) -> dict[str, float]:
    """Nats a scalar. dense: the largest bound of the maskings of this run."""
    if noise is None:
        return {"theorem": 0.0, "dense": 0.0, "systematic": 0.0}
    std = math.sqrt(noise.variance)
    _, systematic = worst_coalition(real_systematic(2, 1, 0, False).A, bound=1.0, noise_std=std)
    return {"theorem": theorem_1(2, 1.0, _RATIO, std), "dense": dense, "systematic": systematic}


if __name__ == "__main__":
    run_or_explain(main)
