"""Small networks that several tests train."""

import torch
import torch.nn.functional as F
from torch import nn

from nn.three_ways import batches, train


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 5, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


def trained(model):
    train(model, batches())
    return [model(batches()[0][0])]


class Functional(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, width))

    def forward(self, x):
        return F.linear(x, self.weight)
