"""Images from public weight updates: what no masking can prevent, and what the size of a batch does to it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from darknight.audit.attack import Attack
from darknight.audit.finding import Finding, Must, Picture
from darknight.audit.gradient_matching import rebuilt_batches
from darknight.audit.intervals import Interval, correlation_interval
from darknight.audit.pairing import paired
from darknight.audit.scene import Scene, default_scheme
from darknight.coding import Field
from darknight.coding.fixed_point import dequantise, exponent_for, largest_magnitude, quantise_nearest
from darknight.errors import PrivacyWarning
from darknight.nn import protect_, unprotect_
from darknight.report import Curve, Row, curves_chart, image_rows
from darknight.runtime import Runtime

_LEARNING_RATE = 0.1
_MODEL = "mlp"
_SIZES = {True: (1, 4, 8, 32), False: (1, 2, 4, 8, 16, 32, 64)}  # of a batch, quick and not
_IMAGES, _BATCHES = {True: 32, False: 64}, 8  # attacked at each size, at most
_STARTS = {True: 2, False: 4}
_STEPS = {True: 300, False: 1000}
_WORK = 1 << 21  # gradients of all batches of one size together
_SHOWN_SIZES = (1, 8, 32)
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Inversion:
    """Batches of one size, example by example: what was in them, and what was rebuilt; and somebody's guess."""

    batch: int
    truth: Tensor
    rebuilt: Tensor
    found: Interval
    guessed: Interval


def run(scene: Scene) -> Sequence[Finding]:
    inversions = []
    for batch in _SIZES[scene.quick]:
        scene.tell(f"inverting the gradients of batches of {batch}")
        inversions.append(inverted(scene, batch))
    pictures = _pictures(inversions)
    return [_finding(inversion, pictures if not place else ()) for place, inversion in enumerate(inversions)]


def inverted(scene: Scene, batch: int) -> Inversion:
    """Some steps of training from the same weights, each on a batch of its own, and the attack on each."""
    half = len(scene.images) // 2
    features = scene.images[0].numel()
    values = sum(parameter.numel() for parameter in scene.model(_MODEL).parameters())
    victims = max(1, min(_BATCHES, _IMAGES[scene.quick] // batch, _WORK // (values * _STARTS[scene.quick])))
    images, known = scene.images[: victims * batch], scene.images[half:]
    labels = scene.labels[: victims * batch]
    steps = [_step(scene, *some) for some in zip(torch.split(images, batch), torch.split(labels, batch), strict=True)]
    before = [weight for weight, _ in steps[0]]
    updates = [torch.stack([step[layer][1] for step in steps]) for layer in range(len(before))]
    rebuilt = rebuilt_batches(
        before,
        updates,
        batch=batch,
        known=known.flatten(1),
        starts=_STARTS[scene.quick],
        steps=_STEPS[scene.quick],
        seed=scene.seed,
    )
    mean = known.mean(dim=0).flatten()
    truth = images.view(victims, batch, features) - mean
    guesses = known[: victims * batch].view(victims, batch, features) - mean
    own = torch.cat([paired(mine - mean, theirs) for mine, theirs in zip(rebuilt, truth, strict=True)])
    guessed = torch.cat([paired(mine, theirs) for mine, theirs in zip(guesses, truth, strict=True)])
    truth = truth.flatten(0, 1)
    return Inversion(
        batch=batch,
        truth=images,
        rebuilt=(own + mean).view(images.shape),
        found=correlation_interval(own, truth, seed=scene.seed),
        guessed=correlation_interval(guessed, truth, seed=scene.seed),
    )


def _step(scene: Scene, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """One step of gradient descent: each layer's weights before it, and the gradient, both as workers can know them.

    The enclave works alone here: with a field the weights are the same bits as with workers.
    """
    scheme, model = default_scheme(), scene.model(_MODEL)
    assert isinstance(scheme.arithmetic, Field)
    bits = scheme.arithmetic.bits
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    before = [sent(layer.weight, bits) for layer in layers]
    with Runtime(scheme, None, seed=scene.seed) as runtime, warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # about batches of one: they are the point
        protect_(model, runtime)
        loss: Tensor = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE).step()
        unprotect_(model)
    return [(old, (old - sent(layer.weight, bits)) / _LEARNING_RATE) for old, layer in zip(before, layers, strict=True)]


def sent(weight: Tensor, bits: int) -> Tensor:
    """A weight as workers get it: rounded to so many bits."""
    weight = weight.detach()
    exponent = exponent_for(largest_magnitude(weight), bits)
    return dequantise(quantise_nearest(weight, exponent), exponent, torch.float32)


def _finding(inversion: Inversion, pictures: tuple[Picture, ...]) -> Finding:
    found, guessing, batch = inversion.found, max(0.0, inversion.guessed.value), inversion.batch
    several = f"batches of {batch}" if batch > 1 else "batches of a single example"
    return Finding(
        target=f"any scheme: weights before and after a step, {several}",
        must=Must.SHOW,
        control=False,
        measure="correlation of rebuilt and true images, beyond the average image",
        value=found.value,
        low=found.low,
        high=found.high,
        guessing=guessing,
        threshold=(1 + guessing) / 2,
        words="Weights are public, so their change is too: it is the batch's gradient, and no masking can hide it. "
        "Guessing is other images of the kind, each beside the one that it resembles most.",
        details={"batch": batch, "images": len(inversion.truth), "batches": len(inversion.truth) // batch},
        pictures=pictures,
    )


def _pictures(inversions: Sequence[Inversion]) -> tuple[Picture, ...]:
    sizes = [inversion.batch for inversion in inversions]
    curves = [
        Curve(
            name=name,
            x=sizes,
            y=[interval.value for interval in intervals],
            low=[interval.low for interval in intervals],
            high=[interval.high for interval in intervals],
        )
        for name, intervals in (
            ("rebuilt from the update", [inversion.found for inversion in inversions]),
            ("guessed", [inversion.guessed for inversion in inversions]),
        )
    ]
    truth = inversions[-1].truth[:_SHOWN]  # those of other sizes begin with the same ones
    span = float(truth.min()), float(truth.max())
    rows = [Row(title="Original", subtitle="stays in the enclave", images=truth, span=span)]
    rows += [
        Row(title="Rebuilt", subtitle=f"batch of {inversion.batch}", images=inversion.rebuilt[:_SHOWN], span=span)
        for inversion in inversions
        if inversion.batch in _SHOWN_SIZES
    ]
    return (
        Picture(
            title="What the size of a batch does to gradient inversion",
            caption="Correlation with the true images, beyond the average image, with 95 % intervals, for an MLP at "
            "its first step. More steps on the same example, and better attacks, can only add to it.",
            png=curves_chart(curves, x_label="examples in a batch", y_label="correlation", logarithmic=True),
        ),
        Picture(
            title="Images rebuilt from one step's change of the weights",
            caption="The attacker has the weights as workers get them, before and after one step, and the size of the "
            "batch. It knows neither labels nor biases.",
            png=image_rows(rows),
        ),
    )


ATTACK = Attack(
    key="gradient-inversion",
    title="Gradient inversion from public weights",
    question="What do the weights themselves say about the data, batch by batch?",
    how="The difference of the weights before and after a step is the gradient of the batch. The attacker looks for "
    "images and labels with the same gradient, by gradient descent.",
    what_to_do="Masking does not and cannot prevent this, since workers must have the weights. Use large batches, and "
    "never single examples; add noise to gradients (differential privacy) where weights must not tell of any one "
    "example; keep the layers nearest to the data in the enclave (protect_ with where=).",
    run=run,
)
