"""The best linear decoder that one worker could fit from its shares to the images behind them.

A worker that somehow knew the images behind half of its shares could learn to rebuild the other half, if shares told
anything of images that a linear map can use. This gives it that half, and fits the map by ridge regression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.errors import DataError

_FEWEST = 8
_FARTHEST = 10.0  # deviations from the mean that a feature counts for
_RIDGES = tuple(10.0**exponent for exponent in range(-4, 7))  # per example; the largest leaves only the mean image


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What the decoder made of shares that it was not fitted on.

    `examples` are the positions of those shares, `images` what was rebuilt for them. `correlation` compares rebuilt
    and true images after `mean`, that of the known images, is taken from both: 1 is a perfect copy, 0 nothing beyond
    what anybody knows who has seen such images. `features` names the view of the shares that worked best.
    """

    examples: Tensor
    images: Tensor
    mean: Tensor
    correlation: float
    features: str


def best_linear_decoder(
    shares: Tensor, images: Tensor, *, prime: int | None, seed: int, examples: Tensor | None = None
) -> Reconstruction:
    """Fit on a random half of the pairs (share, image), rebuild the other half.

    shares: (example, *features) as on the wire: residues modulo `prime`, or floats where `prime` is None. images:
    (example, *pixels). The view of the shares and the strength of the ridge are chosen on a quarter of the known half
    that is kept back, as a worker would. examples: (example,) the number of each image, if several shares may belong to
    one: then all of them are known or none is.
    """
    if len(shares) != len(images) or len(shares) < _FEWEST:
        raise DataError(f"{len(shares)} shares for {len(images)} images; needs one for each, and {_FEWEST} or more.")
    fitted, chosen, hidden = split(torch.arange(len(shares)) if examples is None else examples, seed=seed)
    known = torch.cat([chosen, fitted])
    truth = images.flatten(1).to(torch.float64)

    best = None
    for name, view in readings(shares.flatten(1), prime).items():
        ridges = _Ridge(view[fitted], truth[fitted])
        for ridge in _RIDGES:
            error = float((ridges.predict(view[chosen], ridge) - truth[chosen]).square().mean())
            if best is None or error < best[0]:
                best = error, name, view, ridge
    assert best is not None
    _, name, view, ridge = best
    rebuilt = _Ridge(view[known], truth[known]).predict(view[hidden], ridge)
    mean = truth[known].mean(dim=0)
    return Reconstruction(
        examples=hidden,
        images=rebuilt.reshape(len(hidden), *images.shape[1:]).to(torch.float32),
        mean=mean.reshape(images.shape[1:]).to(torch.float32),
        correlation=correlation(rebuilt - mean, truth[hidden] - mean),
        features=name,
    )


def split(examples: Tensor, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of shares to fit decoders on, to choose one by, and to try it on: 3/8, 1/8 and 1/2 of the images."""
    _, image = torch.unique(examples, return_inverse=True)
    order = torch.randperm(int(image.max()) + 1, generator=torch.Generator().manual_seed(seed))
    known = len(order) // 2
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    turn = rank[image]
    places = [(turn >= known // 4) & (turn < known), turn < known // 4, turn >= known]
    fitted, chosen, hidden = (place.nonzero().squeeze(1) for place in places)
    return fitted, chosen, hidden


def correlation(left: Tensor, right: Tensor) -> float:
    """Pearson's correlation over all entries; 0 where one side is constant."""
    a, b = (side.flatten().to(torch.float64) for side in (left, right))
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a.square().sum()) * float(b.square().sum()))
    return float(a @ b) / scale if scale > 0 else 0.0


def readings(shares: Tensor, prime: int | None) -> dict[str, Tensor]:
    """Ways to read a share as real numbers. A residue has no natural place on a line, so several are tried."""
    values = shares.to(torch.float64)
    if prime is None:
        return {"values": values}
    raw = values / prime
    centred = raw - (raw > 0.5).to(torch.float64)
    angle = 2 * math.pi * raw
    return {
        "centred residues": centred,
        "raw residues": raw,
        "raw and centred residues": torch.cat([raw, centred], dim=1),
        "residues on a circle": torch.cat([angle.cos(), angle.sin()], dim=1),
    }


class _Ridge:
    """Ridge regressions of every strength from one decomposition. The intercept is not penalised.

    With standardised inputs X, (example, feature), the weights are X^T (X X^T + c)^-1 Y = (X^T X + c)^-1 X^T Y:
    whichever of the two products is smaller is decomposed.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._centre, self._mean = inputs.mean(dim=0), targets.mean(dim=0)
        deviation = inputs.std(dim=0)
        # A feature that never changes, such as the border of an image, says nothing: it counts as zero.
        self._scale = torch.where(deviation > 1e-12 * inputs.abs().amax(), 1 / deviation, 0.0)
        X, Y = self._standard(inputs), targets - self._mean
        self._examples = len(X)
        self._basis = X if len(X) < X.shape[1] else None  # predictions are combinations of examples, or of features
        product, wanted = (X @ X.T, Y) if self._basis is not None else (X.T @ X, X.T @ Y)
        self._squares, self._directions = torch.linalg.eigh(product)
        self._loadings = self._directions.T @ wanted

    def predict(self, inputs: Tensor, ridge: float) -> Tensor:
        shrunk = self._loadings / (self._squares.clamp_min(0) + ridge * self._examples)[:, None]
        X = self._standard(inputs)
        if self._basis is not None:
            X = X @ self._basis.T
        prediction: Tensor = X @ (self._directions @ shrunk) + self._mean
        return prediction

    def _standard(self, inputs: Tensor) -> Tensor:
        """Around 0 with deviation 1. A residue that wraps around where none did before would outweigh everything."""
        return ((inputs - self._centre) * self._scale).clamp_(-_FARTHEST, _FARTHEST)
