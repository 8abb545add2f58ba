"""MobileNets (Howard et al., 2017; Sandler et al., 2018), and a small one of the second kind."""

from __future__ import annotations

from torch import Tensor, nn

from darknight.models.initialisation import draw_weights

# Version 1: channels and stride of each separable convolution behind the stem.
_V1_STEM = 32
_V1 = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))

# Version 2: expansion, channels, blocks and stride of each stage; for small images the second stage keeps the size.
V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
V2_SMALL_IMAGES = (V2[0], (6, 24, 2, 1), *V2[2:])
SMALL = ((1, 16, 1, 2), (4, 24, 2, 1), (4, 40, 2, 2), (4, 80, 2, 2))


class MobileNetV1(nn.Module):
    """A stem, thirteen depthwise separable convolutions, the mean over all positions, one linear layer.

    small_images: the stem keeps the size instead of halving it. ReLU6 throughout, as in its authors' code.
    """

    def __init__(
        self, shape: tuple[int, int, int] = (3, 224, 224), classes: int = 1000, *, small_images: bool = False
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [_Convolution(shape[0], _V1_STEM, stride=1 if small_images else 2)]
        channels = _V1_STEM
        for outputs, stride in _V1:
            layers.append(_Separable(channels, outputs, stride))
            channels = outputs
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)
        draw_weights(self, heads=True)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return scores


class MobileNetV2(nn.Module):
    """A stem, stages of inverted residuals, a 1x1 convolution, the mean over all positions, one linear layer.

    Before the linear layer is a dropout, which draws from torch's global generator in training mode. small_images: the
    stem keeps the size instead of halving it. The state_dict of the large form is torchvision's `mobilenet_v2`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 224, 224),
        classes: int = 1000,
        *,
        stages: tuple[tuple[int, int, int, int], ...] = V2,
        stem: int = 32,
        last: int = 1280,
        dropout: float = 0.2,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [_Convolution(shape[0], stem, stride=1 if small_images else 2)]
        channels = stem
        for expansion, outputs, blocks, stride in stages:
            for block in range(blocks):
                layers.append(_InvertedResidual(channels, outputs, expansion, stride if block == 0 else 1))
                channels = outputs
        layers.append(_Convolution(channels, last, kernel=1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes))
        draw_weights(self, heads=True)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return scores


class _Convolution(nn.Sequential):
    """A convolution without bias, batch norm, ReLU6."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class _Separable(nn.Module):
    """A 3x3 convolution of each channel alone, then a 1x1 one over all of them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = _Convolution(inputs, inputs, stride=stride, groups=inputs)
        self.pointwise = _Convolution(inputs, outputs, kernel=1)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.pointwise(self.depthwise(features))
        return out


class _InvertedResidual(nn.Module):
    """1x1 to more channels, 3x3 of each channel alone, 1x1 to few without ReLU; a shortcut where the shape stays."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        widen = [] if expansion == 1 else [_Convolution(inputs, hidden, kernel=1)]
        self.conv = nn.Sequential(
            *widen,
            _Convolution(hidden, hidden, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, kernel_size=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self._has_shortcut = stride == 1 and inputs == outputs

    def forward(self, features: Tensor) -> Tensor:
        changed: Tensor = self.conv(features)
        return features + changed if self._has_shortcut else changed
