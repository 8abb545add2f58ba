"""What all attacks of an audit share: the data, and the trainings whose workers were recorded."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from darknight.audit.recording import Recording, record_training
from darknight.coding import Scheme
from darknight.data import Dataset
from darknight.errors import DataError
from darknight.models import MODELS, build_model

_LARGEST_SIDE = 32  # pixels; larger images are scaled down, so that decoders can be trained in minutes
_FEWEST = 128  # examples
_SENT_VALUES = 1 << 22  # of all images, over all epochs


def default_scheme() -> Scheme:
    """What `darknight train` uses unless told otherwise: the scheme that every attack has to fail on."""
    return Scheme(inputs=4, colluders=1)


class Scene:
    """The examples of an audit and the recorded trainings on them, each made once, when it is first asked for.

    quick: fewer examples and epochs, smaller decoders. seed: of examples, weights, batches and attacks; never of masks.
    tell: is told what takes long.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        quick: bool,
        seed: int = 0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.data, self.quick, self.seed, self.tell = data, quick, seed, tell
        count, self.epochs = (480, 4) if quick else (960, 8)
        values = math.prod(data.shape)
        count = min(count, len(data.train), max(_FEWEST, _SENT_VALUES // (values * self.epochs)))
        if count < _FEWEST:
            raise DataError(f"{data.name}: {len(data.train)} training examples; an audit needs {_FEWEST} or more.")
        chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))[:count]
        self.images = _small(data.train.examples(chosen))
        self.labels = data.train.labels[chosen]
        self.classes = data.classes
        self.model_name = "small-cnn" if min(self.shape[1:]) >= MODELS["small-cnn"].smallest else "mlp"
        self._recordings: dict[tuple[Scheme, str, int, int], Recording] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image; a row of a table is an image of one line."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def model(self, name: str | None = None) -> nn.Module:
        """A new model for the images, always with the same weights."""
        return build_model(name or self.model_name, shape=self.shape, classes=self.classes, seed=self.seed)

    def recording(
        self, scheme: Scheme, model: str | None = None, *, examples: int | None = None, epochs: int | None = None
    ) -> Recording:
        """A training by separate worker processes that keep what they saw, on these examples or the first of them."""
        name, count = model or self.model_name, min(examples or len(self.images), len(self.images))
        key = scheme, name, count, epochs or self.epochs
        if key not in self._recordings:
            self.tell(f"recording {key[-1]} epochs of a training of {name} by {scheme.workers} workers")
            self._recordings[key] = record_training(
                scheme,
                model=self.model(name),
                images=self.images[:count],
                labels=self.labels[:count],
                batch_size=96,
                epochs=key[-1],
                learning_rate=0.05,
                seed=self.seed,
            )
        return self._recordings[key]


def _small(images: Tensor) -> Tensor:
    """(example, channel, height, width), no side longer than decoders can cope with."""
    if images.ndim == 2:
        return images[:, None, None, :]
    height, width = images.shape[2:]
    if max(height, width) <= _LARGEST_SIDE:
        return images
    return adaptive_avg_pool2d(images, (min(height, _LARGEST_SIDE), min(width, _LARGEST_SIDE)))
