"""The networks by name, and which form of each an image of a given size gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from darknight.errors import UsageError
from darknight.models.mlp import MLP
from darknight.models.mobilenet import SMALL as MOBILENET_SMALL
from darknight.models.mobilenet import V2_SMALL_IMAGES, MobileNetV1, MobileNetV2
from darknight.models.resnet import BasicBlock, Bottleneck, ResNet
from darknight.models.small import SMALLEST, SmallCNN
from darknight.models.vgg import SMALL as VGG_SMALL
from darknight.models.vgg import VGG

Shape = tuple[int, int, int]
Builder = Callable[[Shape, int], nn.Module]

_MOST_PIXELS, _MOST_CLASSES = 1 << 16, 1 << 24  # beyond them sizes in bytes no longer fit in torch's 64 bits


@dataclass(frozen=True)
class Form:
    """One way in which a network is built. smallest: pixels of the shorter side of an image, at least."""

    name: str
    smallest: int
    build: Builder


@dataclass(frozen=True)
class Entry:
    """A network: what it is, in a few words, and its forms, the one for the largest images first."""

    note: str
    forms: tuple[Form, ...]

    @property
    def smallest(self) -> int:
        """Pixels of the shorter side of the smallest image that it takes."""
        return self.forms[-1].smallest

    def form_for(self, shape: tuple[int, ...]) -> Form | None:
        """The first form that takes such an image; None if it is too small for all."""
        return next((form for form in self.forms if form.smallest <= min(shape[1:])), None)


def _two_forms(note: str, large: Builder, small: Builder, *, smallest: int) -> Entry:
    return Entry(note, (Form("ImageNet", 64, large), Form("CIFAR", smallest, small)))


def _one_form(note: str, build: Builder, *, smallest: int) -> Entry:
    return Entry(note, (Form("any", smallest, build),))


def _resnet(note: str, block: type[BasicBlock] | type[Bottleneck], *blocks: int) -> Entry:
    large = partial(ResNet, block=block, blocks=blocks)
    return _two_forms(note, large, partial(large, small_images=True), smallest=8)


def _vgg(note: str, *, batch_norm: bool) -> Entry:
    large = partial(VGG, batch_norm=batch_norm)
    return _two_forms(note, large, partial(large, wide_head=False), smallest=32)


MODELS: dict[str, Entry] = {
    "vgg16": _vgg("no batch norm", batch_norm=False),
    "vgg16-bn": _vgg("batch norm", batch_norm=True),
    "resnet18": _resnet("basic blocks", BasicBlock, 2, 2, 2, 2),
    "resnet50": _resnet("bottlenecks", Bottleneck, 3, 4, 6, 3),
    "resnet152": _resnet("bottlenecks", Bottleneck, 3, 8, 36, 3),
    "mobilenet-v1": _two_forms("separable", MobileNetV1, partial(MobileNetV1, small_images=True), smallest=16),
    "mobilenet-v2": _two_forms(
        "inverted residuals",
        MobileNetV2,
        partial(MobileNetV2, stages=V2_SMALL_IMAGES, small_images=True),
        smallest=8,
    ),
    "vgg-small": _one_form(
        "for slow CPUs", partial(VGG, stages=VGG_SMALL, batch_norm=True, wide_head=False), smallest=8
    ),
    "resnet-small": _one_form(
        "for slow CPUs", partial(ResNet, blocks=(1, 1, 1), width=16, small_images=True), smallest=4
    ),
    "mobilenet-small": _one_form(
        "for slow CPUs",
        partial(MobileNetV2, stages=MOBILENET_SMALL, stem=16, last=320, dropout=0.0, small_images=True),
        smallest=8,
    ),
    "small-cnn": _one_form("3 convolutions", SmallCNN, smallest=SMALLEST),
    "mlp": _one_form("3 linear layers", MLP, smallest=1),
}


def build_model(name: str, *, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A new model whose initial weights depend on `seed` alone. torch's global generator is left as it was.

    shape: channels, height and width of an image, or (columns,) of a table, which the mlp takes. It decides the form:
    from 64 pixels a side upwards that of ImageNet, below that of CIFAR, for networks that have both. Dropouts (in the
    ImageNet form of VGG, in mobilenet-v2) draw from torch's global generator as usual, so a training repeats itself if
    `torch.manual_seed` is called before it.
    """
    form, image = _fitting(name, shape, classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return form.build(image, classes)


def _fitting(name: str, shape: tuple[int, ...], classes: int) -> tuple[Form, Shape]:
    """The form, and the shape as it takes it: to the mlp, a row of a table is an image of one line."""
    if len(shape) == 1 and canonical(name) != "mlp":
        raise UsageError(f"rows of {shape[0]} columns; {canonical(name)} is for images. Use mlp.")
    image = (1, 1, shape[0]) if len(shape) == 1 else shape
    return find_form(name, image, classes), (image[0], image[1], image[2])


def find_form(name: str, shape: tuple[int, ...], classes: int) -> Form:
    """The form that fits, after a look at everything that was asked for."""
    entry = MODELS[canonical(name)]
    check_sizes(shape, classes)
    form = entry.form_for(shape)
    if form is None:
        height, width = shape[1:]
        others = [other for other, each in MODELS.items() if each.form_for(shape)]
        raise UsageError(
            f"images of {height}x{width}; {canonical(name)} needs {entry.smallest}x{entry.smallest} or more. "
            f"Enlarge or pad them, or use one of {', '.join(sorted(others))}."
        )
    return form


def canonical(name: str) -> str:
    """The name as the registry has it: torchvision's `vgg16_bn` and `mobilenet_v2` are understood too."""
    found = name.replace("_", "-")
    if found not in MODELS:
        raise UsageError(f"unknown model {name!r}; use one of {', '.join(sorted(MODELS))}.")
    return found


def check_sizes(shape: tuple[int, ...], classes: int) -> None:
    """Refuses shapes and numbers of classes that no network can have."""
    if len(shape) != 3 or not all(_whole(size, _MOST_PIXELS) for size in shape):
        raise UsageError(
            f"shape {'x'.join(map(str, shape))}; needs channels x height x width, such as 3x224x224, "
            f"each a whole number from 1 to {_MOST_PIXELS}."
        )
    if not _whole(classes, _MOST_CLASSES):
        raise UsageError(f"classes {classes}; needs a whole number from 1 to {_MOST_CLASSES}.")


def _whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
