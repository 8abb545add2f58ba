"""A small neural network, trained to rebuild images from shares.

Like the linear decoder it is told the images behind half of the shares. It begins with the mean of those images, which
is the best guess of somebody who learns nothing, and ends with the weights that did best on images kept back; so it is
never much worse than guessing, and better only if there is something to learn.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from darknight.audit.linear_decoder import readings, split

_BATCH = 64
_RATE = 2e-3
_CHANNELS, _HIDDEN = 32, 256


@dataclass(frozen=True, eq=False)
class Decoded:
    """What the network made of shares that it was not trained on. examples: their positions. mean: of known images."""

    examples: Tensor
    images: Tensor
    mean: Tensor


def trained_decoder(
    shares: Tensor, images: Tensor, *, prime: int | None, seed: int, examples: Tensor, epochs: int
) -> Decoded:
    """Train on the pairs (share, image) of some images and rebuild those of the others.

    shares: (example, *feature) as on the wire. images: (example, channel, height, width). examples: the number of each
    image, all of whose shares are known or none. Torch's global generator is left as it was.
    """
    fitted, chosen, hidden = split(examples, seed=seed)
    mean = images[torch.cat([fitted, chosen])].mean(dim=0)
    inputs = _channels(shares, images.shape[1:], prime, fitted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _Decoder(inputs.shape[1:], mean)
        _train(network, (inputs[fitted], images[fitted]), (inputs[chosen], images[chosen]), epochs)
    with torch.no_grad():
        rebuilt = torch.cat([network(part) for part in torch.split(inputs[hidden], _BATCH)])
    return Decoded(examples=hidden, images=rebuilt, mean=mean)


def _train(network: _Decoder, known: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor], epochs: int) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=1e-2)
    steps = epochs * math.ceil(len(known[0]) / _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, state = _error(network, *kept), copy.deepcopy(network.state_dict())
    for _ in range(epochs):
        network.train()
        for picked in torch.split(torch.randperm(len(known[0])), _BATCH):
            optimizer.zero_grad()
            loss = mse_loss(network(known[0][picked]), known[1][picked])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        if (error := _error(network, *kept)) < best:
            best, state = error, copy.deepcopy(network.state_dict())
    network.load_state_dict(state)
    network.eval()


def _error(network: _Decoder, inputs: Tensor, images: Tensor) -> float:
    network.eval()
    with torch.no_grad():
        return float(mse_loss(network(inputs), images))


class _Decoder(nn.Module):
    """Two roads that are added to the mean image: linear layers, and for what stays in its place convolutions."""

    def __init__(self, shape: torch.Size, mean: Tensor) -> None:
        super().__init__()
        features = math.prod(shape)
        self.mean = nn.Buffer(mean)
        self.near = (
            nn.Sequential(
                nn.Conv2d(shape[0], _CHANNELS, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1),
                nn.ReLU(),
                _silent(nn.Conv2d(_CHANNELS, mean.shape[0], 3, padding=1)),
            )
            if shape[1:] == mean.shape[1:]
            else None
        )
        self.far = nn.Sequential(
            nn.Flatten(),
            nn.Linear(features, _HIDDEN),
            nn.ReLU(),
            nn.Dropout(0.2),
            _silent(nn.Linear(_HIDDEN, mean.numel())),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        image: Tensor = self.mean + self.far(inputs).view(-1, *self.mean.shape)
        return image if self.near is None else image + self.near(inputs)


def _silent(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """A layer that gives nothing yet."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _channels(shares: Tensor, shape: torch.Size, prime: int | None, known: Tensor) -> Tensor:
    """(example, channel, height, width): shares on a line and on a circle, each feature with mean 0 and deviation 1.

    A share of another size than the image is shown to the network as one row of pixels.
    """
    flat = shares.flatten(1)
    place = tuple(shape) if flat.shape[1] == math.prod(shape) else (1, 1, flat.shape[1])
    # A network finds out by itself what raw residues would add.
    chosen = [reading for name, reading in readings(flat, prime).items() if "raw" not in name]
    read = [reading.view(len(flat), -1, *place[1:]) for reading in chosen]
    channels = torch.cat(read, dim=1)
    centred = channels - channels[known].mean(dim=0)
    deviation = channels[known].std(dim=0)
    return torch.where(deviation > 0, centred / deviation, 0.0).clamp_(-10.0, 10.0).to(torch.float32)
