"""A network whose first layer feeds a ReLU directly, and its training by workers that keep what they see.

Most networks of the paper begin so. What a gradient in the clear shows is easiest to see here: batch norm between the
first layer and its ReLU, which our small network has, would blur it.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import nn

from darknight.audit.recording import Recording, record_training
from darknight.audit.scene import Scene
from darknight.coding import Scheme

_CHANNELS = 64
_BATCH = 96
_VALUES = 1 << 22  # of the first layer's gradient, in one step

_recorded: WeakKeyDictionary[Scene, dict[Scheme, Recording]] = WeakKeyDictionary()


def victim(scene: Scene) -> nn.Sequential:
    """A convolution with bias, a ReLU and a linear head for the images of the scene, always with the same weights."""
    channels, height, width = scene.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(scene.seed)
        return nn.Sequential(
            nn.Conv2d(channels, _CHANNELS, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(_CHANNELS * height * width, scene.classes),
        )


def victim_recording(scene: Scene, scheme: Scheme) -> Recording:
    """One step of it on one batch, made once for each scene and scheme."""
    recordings = _recorded.setdefault(scene, {})
    if scheme not in recordings:
        scene.tell(f"recording a step of a convolution with ReLU by {scheme.workers} workers")
        fitting = _VALUES // (_CHANNELS * math.prod(scene.shape[1:]))
        count = max(2 * scheme.inputs, min(_BATCH, fitting) // scheme.inputs * scheme.inputs)
        recordings[scheme] = record_training(
            scheme,
            model=victim(scene),
            images=scene.images[:count],
            labels=scene.labels[:count],
            batch_size=count,
            epochs=1,
            learning_rate=0.05,
            seed=scene.seed,
        )
    return recordings[scheme]
