"""The noise settings of the paper, as schemes of ours.

The paper's K=2 on three workers: dense code, float32, gradients in the clear. Its noise is in units of inputs that are
normalised to at most 1; ours in units of each layer's bound C1 (a power of two that follows the largest value seen), so
noise and signal are to each other as in the paper. Checks are off in these runs: they change no number of a result
(a check returns it or raises), and the paper's accuracy figures have none either.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import darknight as dk
from darknight.data import Dataset
from darknight.train import Recipe

FIELD = dk.Scheme(inputs=4, colluders=1)
WORDS = {
    "clear": "torch in float32, nothing protected",
    "field": "K=4, M=1, prime 2^28 - 57 with 10 bits, gradients masked",
    "real": "the paper's: K=2, M=1, dense code, float32, gradients in the clear, checks off",
}


@dataclass(frozen=True, kw_only=True)
class Noise:
    """A Gaussian, in units of the bound of a layer's input."""

    mean: float
    variance: float

    def words(self) -> dict[str, float]:
        return {"mean": self.mean, "variance": self.variance}

    def scheme(self) -> dk.Scheme:
        noise = dk.Real(noise_std=math.sqrt(self.variance), noise_mean=self.mean, dtype=torch.float32)
        return dk.Scheme(inputs=2, colluders=1, arithmetic=noise, mask_gradients=False, mixing="dense", integrity="off")


# By name; None for the clear run and the field. In the order in which they are run: the ends first.
TRAINING: Mapping[str, Noise | None] = {
    "clear": None,
    "field": None,
    "N(0, 4e8)": Noise(mean=0.0, variance=4e8),
    "N(5e4, 1e7)": Noise(mean=5e4, variance=1e7),
    "N(0, 1e7)": Noise(mean=0.0, variance=1e7),
    "N(0, 1e8)": Noise(mean=0.0, variance=1e8),
}
TABLE_2: Mapping[str, Noise | None] = {
    "clear": None,
    "field": None,
    "N(4e3, 1.6e7)": Noise(mean=4e3, variance=1.6e7),
    "N(1e4, 2.5e7)": Noise(mean=1e4, variance=2.5e7),
    "N(1e4, 1e8)": Noise(mean=1e4, variance=1e8),
    "N(0, 4e8)": Noise(mean=0.0, variance=4e8),
}
MODELS = ("vgg-small", "resnet-small", "mobilenet-small")


def training_parser(words: str | None, settings: Mapping[str, Noise | None]) -> argparse.ArgumentParser:
    """The flags of whatever trains these models on images; `words` is the script's own text."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file, which is resumed if it is there")
    parser.add_argument("--model", action="append", help=f"of {', '.join(MODELS)}; may be repeated (default: all)")
    parser.add_argument("--setting", action="append", help=f"of {'; '.join(settings)}; may be repeated (default: all)")
    parser.add_argument("--examples", type=int, default=10_000, help="training images (default: 10000)")
    parser.add_argument("--test-examples", type=int, default=2_000, help="default: 2000")
    parser.add_argument("--epochs", type=int, default=20, help="default: 20")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="at the top of one cycle (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches, not of masks (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a few digits of 8x8 for a few epochs: does it work?")
    return parser


def recipe_of(flags: argparse.Namespace) -> Recipe:
    return Recipe(
        epochs=flags.epochs,
        batch_size=flags.batch_size,
        learning_rate=flags.learning_rate,
        schedule="one-cycle",
        nesterov=True,
        weight_decay=5e-4,
        seed=flags.seed,
    )


def chosen(given: list[str] | None, known: Any, what: str) -> list[str]:
    """Those that were asked for, in the order of `known`; all if none was."""
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        raise dk.errors.UsageError(f"unknown {what} {unknown[0]!r}; use one of {', '.join(known)}.")
    return [name for name in known if not given or name in given]


def scale_of(data: Dataset, recipe: Recipe) -> dict[str, Any]:
    """What a file says of how much was trained on what."""
    return {
        "data": data.name,
        "train_examples": len(data.train),
        "test_examples": len(data.test),
        "image": list(data.shape),
        "classes": data.classes,
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "seed": recipe.seed,
        "schemes": WORDS,
    }
