"""Residual networks (He et al., 2015): 18, 50 and 152 layers, and a small one."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from darknight.models.initialisation import draw_weights


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, features: Tensor) -> Tensor:
        shortcut = features if self.downsample is None else self.downsample(features)
        changed = self.relu(self.bn1(self.conv1(features)))
        changed = self.bn2(self.conv2(changed))
        changed += shortcut
        out: Tensor = self.relu(changed)
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the last one widens four times.

    The 3x3 one has the stride, as in torchvision; in the paper the first 1x1 one has it, which costs less.
    """

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, features: Tensor) -> Tensor:
        shortcut = features if self.downsample is None else self.downsample(features)
        changed = self.relu(self.bn1(self.conv1(features)))
        changed = self.relu(self.bn2(self.conv2(changed)))
        changed = self.bn3(self.conv3(changed))
        changed += shortcut
        out: Tensor = self.relu(changed)
        return out


class ResNet(nn.Module):
    """A stem, stages of residual blocks (`layer1`, `layer2`, ...), the mean over all positions, one linear layer.

    small_images: the stem is a 3x3 convolution that keeps the size, without pooling, instead of a 7x7 one that, with a
    max pooling, quarters it. The state_dict of the large form is torchvision's.
    """

    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 224, 224),
        classes: int = 1000,
        *,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        width: int = 64,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(shape[0], width, 3) if small_images else _convolution(shape[0], width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        self._stages = [f"layer{number}" for number in range(1, len(blocks) + 1)]
        channels = width
        for stage, (name, count) in enumerate(zip(self._stages, blocks, strict=True)):
            self.add_module(name, _stage(block, channels, width << stage, count, stride=2 if stage else 1))
            channels = (width << stage) * block.expansion
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        draw_weights(self, heads=False)

    def forward(self, images: Tensor) -> Tensor:
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for name in self._stages:
            features = self.get_submodule(name)(features)
        scores: Tensor = self.fc(self.avgpool(features).flatten(1))
        return scores


def _stage(
    block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, count: int, *, stride: int
) -> nn.Sequential:
    """`count` blocks, of which the first may halve the image; where its shape changes, its shortcut does too."""
    outputs = width * block.expansion
    downsample = None
    if stride != 1 or inputs != outputs:
        downsample = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
    rest = [block(outputs, width, 1, None) for _ in range(1, count)]
    return nn.Sequential(block(inputs, width, stride, downsample), *rest)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Without a bias, which the batch norm behind it would remove again."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
