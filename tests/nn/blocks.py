"""Forwards of somebody's own, as people write them."""

import torch
import torch.nn.functional as F
from torch import nn


class Basic(nn.Module):
    """As in torchvision: what the shortcut does comes behind the last normalisation."""

    def __init__(self, inputs=6, width=6, stride=1, inplace=True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=inplace)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if inputs != width or stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        out = self.relu(out)

        return out


class Inverted(nn.Module):
    """As MobileNetV2's in torchvision."""

    def __init__(self, inputs=6, outputs=6) -> None:
        super().__init__()
        self.use_res_connect = inputs == outputs
        self.conv = nn.Sequential(
            nn.Sequential(nn.Conv2d(inputs, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
            nn.Conv2d(8, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x):
        if self.use_res_connect:
            return x + self.conv(x)
        else:
            return self.conv(x)


class Digits(nn.Module):
    """As in the first example of many a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(6, 4, 3)
        self.conv2 = nn.Conv2d(4, 5, 3)
        self.fc1 = nn.Linear(5 * 2, 7)
        self.fc2 = nn.Linear(7, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


class Added(nn.Module):
    """torch.add, a ReLU that is a function, and a shortcut on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.last = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.BatchNorm2d(6)

    def forward(self, x):
        """Twice.

        With a docstring of several lines.
        """
        y: torch.Tensor = torch.relu(torch.add(x, self.bn(self.conv(x))))
        return x + self.last(y) if self.training else F.relu6(self.last(y) + x)
