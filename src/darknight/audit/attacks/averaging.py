"""Averaging what was sent of the same image in every epoch: noise that repeats or is too small goes away."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from darknight.audit.attack import Attack
from darknight.audit.broken import Fault, broken_sent
from darknight.audit.finding import Finding, Must, Picture
from darknight.audit.intervals import Interval, correlation_interval
from darknight.audit.recording import Recording, Sent
from darknight.audit.scene import Scene, default_scheme
from darknight.report import Curve, Row, curves_chart, image_rows

_THRESHOLD = 0.2
_COLUMNS = 8
_MODEL = "mlp"  # many epochs of few images, and of the cheapest network: what counts is the first layer's shares


def run(scene: Scene) -> Sequence[Finding]:
    count, epochs = (96, 16) if scene.quick else (192, 64)
    recording = scene.recording(default_scheme(), _MODEL, examples=count, epochs=epochs)
    targets = [
        ("the default scheme", False, recording.sent(), recording.prime),
        ("control: reused noise", True, broken_sent(recording, Fault.REUSED_NOISE, seed=scene.seed), recording.prime),
        ("control: weak noise", True, broken_sent(recording, Fault.WEAK_NOISE, seed=scene.seed), None),
    ]
    findings, curves = [], []
    for name, broken, sent, prime in targets:
        track = [(count, *_averaged(sent, prime, count)) for count in _counts(recording)]
        found = [
            correlation_interval(rebuilt, images - images.mean(dim=0), seed=scene.seed) for _, rebuilt, images in track
        ]
        curves.append(_curve(name, [count for count, *_ in track], found))
        findings.append((name, broken, track, found))
    chart = Picture(
        title="What averaging brings",
        caption="Correlation with the image, beyond the mean image, by the number of epochs whose shares are averaged. "
        "Shaded: 95 % intervals.",
        png=curves_chart(
            *(curves,),
            x_label="epochs averaged",
            y_label="correlation with the image",
            threshold=_THRESHOLD,
            logarithmic=True,
        ),
    )
    return [_finding(recording, *each, pictures=(chart,) * (number == 0)) for number, each in enumerate(findings)]


def _counts(recording: Recording) -> list[int]:
    """1, 2, 4 .. all epochs."""
    epochs = recording.steps[-1].epoch + 1
    return [2**power for power in range(epochs.bit_length()) if 2**power <= epochs]


def _averaged(sent: Sent, prime: int | None, epochs: int) -> tuple[Tensor, Tensor]:
    """The mean of the shares of each image over the first epochs, less that over all images; and the images.

    It may have been another worker in every epoch: one share of each masking, which the guarantee allows. Residues lie
    on a circle, so their mean is a direction; a mask that is always the same is the mean direction over all images.
    """
    early = sent.epochs < epochs
    examples, owner = torch.unique(sent.examples[early], return_inverse=True)
    shares = sent.shares[early].flatten(1).to(torch.float64)
    if prime is not None:
        circle = torch.polar(torch.ones_like(shares), shares * (2 * math.pi / prime))
        means = torch.zeros(len(examples), shares.shape[1], dtype=circle.dtype).index_add_(0, owner, circle)
        rebuilt = (means * means.sum(dim=0).conj()).angle()
    else:
        means = torch.zeros(len(examples), shares.shape[1], dtype=torch.float64).index_add_(0, owner, shares)
        rebuilt = means / epochs
    images = torch.zeros(len(examples), *sent.images.shape[1:])
    images[owner] = sent.images[early]
    return (rebuilt - rebuilt.mean(dim=0)).view(images.shape), images


def _seen(rebuilt: Tensor, images: Tensor) -> Tensor:
    """As a picture: around the mean image, with the contrast that images have."""
    mean = images.mean(dim=0)
    return (mean + rebuilt * ((images - mean).std() / rebuilt.std()))[:_COLUMNS]


def _curve(name: str, counts: list[int], found: list[Interval]) -> Curve:
    return Curve(
        name=name.removeprefix("control: "),
        x=counts,
        y=[each.value for each in found],
        low=[each.low for each in found],
        high=[each.high for each in found],
    )


_WORDS = {
    "the default scheme": "Noise is fresh and uniform each time, so every average is as uniform as a single share.",
    "control: reused noise": "One mask for everything: what all shares have in common is the mask, and the rest is the "
    "image, from the first epoch on.",
    "control: weak noise": "Gaussian noise of twice the largest pixel hides an image once. Every epoch averages more "
    "of it away.",
}


def _finding(
    recording: Recording,
    name: str,
    broken: bool,
    track: list[tuple[int, Tensor, Tensor]],
    found: list[Interval],
    pictures: tuple[Picture, ...],
) -> Finding:
    (_, once, _), (epochs, rebuilt, images) = track[0], track[-1]
    span = float(images.min()), float(images.max())
    rows = [
        Row(title="Original", subtitle="stays in the enclave", images=images[:_COLUMNS], span=span),
        Row(title="One epoch", subtitle="all that its shares give", images=_seen(once, images), span=span),
        Row(title=f"Mean of {epochs} epochs", subtitle="what they give", images=_seen(rebuilt, images), span=span),
    ]
    picture = Picture(title=name.capitalize(), caption=_WORDS[name], png=image_rows(rows))
    last = found[-1]
    return Finding(
        target=name,
        must=Must.SUCCEED if broken else Must.FAIL,
        control=broken,
        measure=f"correlation of the mean over {epochs} epochs with the image, beyond the mean image",
        value=last.value,
        low=last.low,
        high=last.high,
        guessing=0.0,
        threshold=_THRESHOLD,
        words=_WORDS[name],
        details={"images": len(images), "epochs": epochs, "workers": recording.scheme.workers},
        pictures=(*pictures, picture),
    )


ATTACK = Attack(
    key="averaging",
    title="Averaging over epochs",
    question="The same image is sent again in every epoch. Does the noise average out?",
    how="All shares of an image, one from each epoch, are averaged: residues as directions on a circle, floats as "
    "numbers. What all images have in common is taken away, and the rest compared with the image.",
    what_to_do="Nothing, if it fails. In real arithmetic the bounds of all epochs add up, so watch the ledger's total; "
    "in the field there is nothing to add.",
    run=run,
)
