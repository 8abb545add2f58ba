"""Holes in floating-point noise: candidates that one share excludes with certainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from darknight.audit.attack import Attack
from darknight.audit.finding import Finding, Must, Picture
from darknight.audit.holes import float32_noise_explains, grid_noise_explains
from darknight.audit.intervals import share_interval
from darknight.audit.scene import Scene
from darknight.coding import Real, Scheme, draw_code, joined, real, virtual_batches
from darknight.randomness import Randomness
from darknight.report import Row, image_rows

_NOISE = 2e4  # the paper's, in bounds of the data
_FLOAT32_NOISE = 1.5e3  # the most that the systematic code sends in float32
_SHARES = {True: 24, False: 96}
_CANDIDATES = {True: 40, False: 100}  # tried on each share
_PIXELS = 1 << 22  # of all of them together, at most
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """How many pixels contradict each candidate, (share, candidate); the first candidate is the true image."""

    contradictions: Tensor
    pixels: Tensor  # (candidate, *image): which pixels do, for the first share

    @property
    def excluded(self) -> int:
        """Wrong candidates that are out for certain."""
        return int((self.contradictions[:, 1:] > 0).sum())

    @property
    def tried(self) -> int:
        return self.contradictions[:, 1:].numel()

    @property
    def truth_excluded(self) -> int:
        return int((self.contradictions[:, 0] > 0).sum())


def run(scene: Scene) -> Sequence[Finding]:
    scene.tell("trying candidates on shares")
    others = _CANDIDATES[scene.quick]
    count = max(4, min(_SHARES[scene.quick], _PIXELS // (others * scene.images[0].numel())) // 4 * 4)
    images, pool = scene.images[:count], scene.images[-(others + 1) :]
    candidates = torch.stack([torch.cat([image[None], _others(image, pool)[:others]]) for image in images])
    float64 = Scheme(inputs=4, colluders=1, arithmetic=Real(_NOISE))
    float32 = replace(float64, arithmetic=Real(_FLOAT32_NOISE, dtype=torch.float32), training=False)
    return (
        _finding(
            float32_trial(images, candidates, seed=scene.seed),
            candidates[0],
            "control: noise made in float32",
            control=True,
        ),
        _finding(grid_trial(images, candidates, float64), candidates[0], "our noise, float64 shares", control=False),
        _finding(grid_trial(images, candidates, float32), candidates[0], "our noise, float32 shares", control=False),
    )


def _others(image: Tensor, pool: Tensor) -> Tensor:
    """Images of the pool that are not this one."""
    return pool[(pool != image).flatten(1).any(dim=1)]


def float32_trial(images: Tensor, candidates: Tensor, *, seed: int) -> Trial:
    """Candidates (share, candidate, *image) against shares that a careless implementation would send."""
    std = _NOISE * float(images.abs().max())
    noise = std * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return _trial(float32_noise_explains((images + noise)[:, None], candidates, std))


def grid_trial(images: Tensor, candidates: Tensor, scheme: Scheme) -> Trial:
    """The same against what data workers get from our encoder. The grid and the bound are public."""
    arithmetic, randomness = scheme.arithmetic, Randomness.from_operating_system()
    assert isinstance(arithmetic, Real)
    mixing = draw_code(scheme, randomness.fresh()).A
    grid = real.grid_for(mixing, arithmetic, float(candidates.abs().max()))
    groups, workers = virtual_batches(images, scheme.inputs), range(scheme.inputs)
    shares = real.encode(mixing, groups, grid, randomness.fresh(), arithmetic.dtype, rows=workers)
    shares = joined(shares.transpose(0, 1), len(images))  # the share that each image is in
    steps = (shares.to(torch.float64) * 2.0**grid.exponent).to(torch.int64)  # a float of ours is a whole number of them
    noise = steps[:, None] - real.to_grid(candidates, grid).to(torch.int64)
    return _trial(grid_noise_explains(noise, grid.std, grid.mean))


def _trial(explained: Tensor) -> Trial:
    return Trial(contradictions=(~explained).flatten(2).sum(dim=2), pixels=~explained[0])


def _finding(trial: Trial, candidates: Tensor, target: str, *, control: bool) -> Finding:
    found = share_interval(trial.excluded, trial.tried)
    if control:
        words = (
            "Scaled float32 noise misses many values, so most wrong images are excluded with certainty by a single "
            "share, however large the noise; the true image never is."
        )
    else:
        words = (
            "No image is excluded: for every candidate and pixel, keystream was found that makes the noise it needs."
        )
    return Finding(
        target=target,
        must=Must.SUCCEED if control else Must.FAIL,
        control=control,
        measure="wrong candidates that one share excludes with certainty",
        value=found.value,
        low=found.low,
        high=found.high,
        guessing=0.0,
        threshold=share_interval(0, trial.tried).high,  # one candidate excluded for certain is one too many
        words=words,
        details={
            "shares": len(trial.contradictions),
            "wrong candidates tried": trial.tried,
            "pixels that contradict a wrong candidate, on average": float(trial.contradictions[:, 1:].double().mean()),
            "true images excluded": trial.truth_excluded,
        },
        pictures=(_picture(trial, candidates, target),),
    )


def _picture(trial: Trial, candidates: Tensor, target: str) -> Picture:
    span = float(candidates.min()), float(candidates.max())
    rows = [
        Row(title="Candidates", subtitle="the true image first", images=candidates[:_SHOWN], span=span),
        Row(
            title="Impossible pixels", subtitle="white", images=trial.pixels[:_SHOWN].to(torch.float32), span=(0.0, 1.0)
        ),
    ]
    return Picture(
        title=f"What one share excludes: {target.removeprefix('control: ')}",
        caption="A candidate with one white pixel cannot be the image behind the share.",
        png=image_rows(rows),
    )


ATTACK = Attack(
    key="holes",
    title="Holes in floating-point noise",
    question="Does the noise of real arithmetic rule out images with certainty?",
    how="A share minus a candidate image is the noise that it would have needed. Where the generator cannot make that "
    "value, the candidate is wrong, for certain.",
    what_to_do="Nothing, with our schemes: their noise lives on a grid on which it takes every value. Never make or "
    "scale noise in float32, and distrust any bound for floating-point noise that was derived for real numbers.",
    run=run,
)
