"""VGG16 (Simonyan and Zisserman, 2014), and a small network of its kind."""

from __future__ import annotations

from torch import Tensor, nn

from darknight.models.initialisation import draw_weights

# Channels of the convolutions, stage by stage.
SIXTEEN = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
SMALL = ((16, 16), (32, 32), (64, 64))

_POOLED = 7  # positions along each side that the wide head looks at
_HIDDEN = 4096


class VGG(nn.Module):
    """Stages of 3x3 convolutions with ReLU; after each a max pooling halves the image.

    wide_head: the three linear layers of the paper, with dropout, which draws from torch's global generator in training
    mode; the state_dict is torchvision's `vgg16`, or `vgg16_bn` with batch_norm (there too each convolution keeps the
    bias that the batch norm removes again). Without: the mean over all positions and one linear layer, for small
    images.
    """

    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 224, 224),
        classes: int = 1000,
        *,
        stages: tuple[tuple[int, ...], ...] = SIXTEEN,
        batch_norm: bool = False,
        wide_head: bool = True,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(*_convolutions(shape[0], stages, batch_norm))
        last = stages[-1][-1]
        self.avgpool = nn.AdaptiveAvgPool2d(_POOLED if wide_head else 1)
        self.classifier = _wide_head(last * _POOLED**2, classes) if wide_head else nn.Linear(last, classes)
        draw_weights(self, heads=True)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return scores


def _convolutions(channels: int, stages: tuple[tuple[int, ...], ...], batch_norm: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for stage in stages:
        for outputs in stage:
            layers.append(nn.Conv2d(channels, outputs, kernel_size=3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(outputs))
            layers.append(nn.ReLU(inplace=True))
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    return layers


def _wide_head(inputs: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, _HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(_HIDDEN, classes),
    )
