"""Labels from the last layer's gradient, and the image from the zeros of the first layer's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from darknight.audit.attack import Attack
from darknight.audit.finding import Finding, Must, Picture
from darknight.audit.intervals import correlation_interval, share_interval
from darknight.audit.linear_decoder import best_linear_decoder
from darknight.audit.recording import Recording
from darknight.audit.relu_mask import images_behind, read_as_mask
from darknight.audit.scene import Scene, default_scheme
from darknight.audit.seen_gradients import seen_gradients
from darknight.audit.victim import victim_recording
from darknight.coding import Scheme
from darknight.report import Row, image_rows

_IMAGES = {True: 16, False: 48}  # to rebuild, quick and not
_PIXELS = 1 << 14  # of all images to rebuild together, quick; three times as many otherwise
_FEWEST = 4
_SHOWN = 8
_REBUILT = 0.25  # correlation from which on an image counts as rebuilt; a rebuilt one is near 1
_TARGETS = {True: "control: the paper's setting, gradients in the clear", False: "the default scheme"}


def run(scene: Scene) -> Sequence[Finding]:
    paper, ours = Scheme.paper(), default_scheme()
    return (
        _labels_read(scene.recording(paper), control=True),
        _labels_read(scene.recording(ours), control=False),
        _labels_learnt(scene, scene.recording(ours)),
        _images(scene, victim_recording(scene, paper), control=True),
        _images(scene, victim_recording(scene, ours), control=False),
    )


# --- labels -----------------------------------------------------------------------------------------------------------
def read_labels(gradients: Tensor) -> Tensor:
    """The gradient of the scores is softmax minus one-hot: the smallest entry, the only negative one, is the label."""
    return gradients.argmin(dim=1)


def _labels_read(recording: Recording, *, control: bool) -> Finding:
    guesses = [read_labels(seen_gradients(recording, step, recording.layers[-1])) for step in recording.steps]
    labels = torch.cat([step.labels for step in recording.steps])
    if control:
        words = (
            "Every worker reads every label: it is the place of the one negative entry of the last layer's gradient."
        )
    else:
        words = "The smallest entry of a masked gradient says no more about the label than always naming the commonest."
    return _label_finding(torch.cat(guesses), labels, f"{_TARGETS[control]}: labels read off", control, words)


def _labels_learnt(scene: Scene, recording: Recording) -> Finding:
    """Each data worker for itself: a linear decoder that was told the labels behind half of its shares."""
    steps, inputs = recording.steps, recording.scheme.inputs
    guesses, truth = list[Tensor](), list[Tensor]()
    for worker in range(inputs):
        mine = slice(worker, None, inputs)
        shares = torch.cat([seen_gradients(recording, step, recording.layers[-1])[mine] for step in steps])
        labels = torch.cat([step.labels[mine] for step in steps])
        examples = torch.cat([step.examples[mine] for step in steps])
        wanted = one_hot(labels, scene.classes).to(torch.float32)
        decoded = best_linear_decoder(shares, wanted, prime=recording.prime, seed=scene.seed, examples=examples)
        guesses.append(decoded.images.argmax(dim=1))
        truth.append(labels[decoded.examples])
    return _label_finding(
        torch.cat(guesses),
        torch.cat(truth),
        f"{_TARGETS[False]}: labels learnt",
        control=False,
        words="Told the labels behind half of its shares, a worker still cannot tell those of the other half.",
    )


def _label_finding(guesses: Tensor, labels: Tensor, target: str, control: bool, words: str) -> Finding:
    found = share_interval(int((guesses == labels).sum()), len(labels))
    commonest = int(labels.bincount().max()) / len(labels)
    return Finding(
        target=target,
        must=Must.SUCCEED if control else Must.FAIL,
        control=control,
        measure="labels guessed right",
        value=found.value,
        low=found.low,
        high=found.high,
        guessing=commonest,
        threshold=commonest + (1 - commonest) / 4,
        words=words,
        details={"labels": len(labels)},
    )


# --- images -----------------------------------------------------------------------------------------------------------
def _images(scene: Scene, recording: Recording, *, control: bool) -> Finding:
    scene.tell(f"rebuilding images from gradients: {_TARGETS[control]}")
    step, layer = recording.steps[0], recording.layers[0]
    count = min(_IMAGES[scene.quick], len(step.images))
    count = max(_FEWEST, min(count, _PIXELS * (1 if scene.quick else 3) // math.prod(scene.shape)))
    on = read_as_mask(seen_gradients(recording, step, layer)[:count])
    weight = step.seen(0, layer, "weights")
    known = scene.images[len(step.images) :]  # what anybody may know who has seen other images of the kind
    rebuilt = as_bright_as(known, images_behind(on, weight, padding=(1, 1)))
    truth = step.images[:count]
    # Without what all of them have in common: a fixed picture, the average image or any other, must count for nothing.
    found = correlation_interval(rebuilt - rebuilt.mean(dim=0), truth - truth.mean(dim=0), seed=scene.seed)
    if control:
        words = (
            "The zeros of the first layer's gradient are its ReLU mask. With the public weights each zero is an "
            "inequality on the image, and together they give it back to every worker."
        )
    else:
        words = "A masked gradient has no zeros to read. What its values near zero suggest gives no image."
    cosine = torch.cosine_similarity(rebuilt.flatten(1), truth.flatten(1)).mean()
    error = (rebuilt - truth).square().mean() / float(truth.max() - truth.min()) ** 2
    return Finding(
        target=f"{_TARGETS[control]}: images behind a first layer with ReLU",
        must=Must.SUCCEED if control else Must.FAIL,
        control=control,
        measure="correlation of rebuilt and true images, beyond the average image",
        value=found.value,
        low=found.low,
        high=found.high,
        guessing=0.0,
        threshold=_REBUILT,
        words=words,
        details={
            "images": count,
            "units read as off": float((~on).double().mean()),
            "cosine": float(cosine),
            "signal to noise, dB": -10 * math.log10(max(float(error), 1e-12)),
        },
        pictures=(_picture(truth, on, rebuilt, _TARGETS[control]),),
    )


def as_bright_as(known: Tensor, images: Tensor) -> Tensor:
    """Each image scaled to the size that known ones have on average."""
    size = known.flatten(1).norm(dim=1).mean()
    factors: Tensor = size / images.flatten(1).norm(dim=1).clamp_min(1e-12)
    return images * factors[:, None, None, None]


def _picture(truth: Tensor, on: Tensor, rebuilt: Tensor, target: str) -> Picture:
    span = float(truth.min()), float(truth.max())
    rows = [
        Row(title="Original", subtitle="stays in the enclave", images=truth[:_SHOWN], span=span),
        Row(title="First unit, as read", subtitle="white: on", images=on[:_SHOWN, :1].to(torch.float32), span=(0, 1)),
        Row(title="Rebuilt from all units", subtitle="and public weights", images=rebuilt[:_SHOWN], span=span),
    ]
    return Picture(
        title=f"From the first layer's gradient: {target.removeprefix('control: ')}",
        caption="The worker has the weights and the gradient as it was sent to it, and nothing else.",
        png=image_rows(rows),
    )


ATTACK = Attack(
    key="gradients-in-the-clear",
    title="Gradients: labels and images behind them",
    question="Can a worker read labels or images from the gradients that it gets?",
    how="The last layer's gradient is softmax minus one-hot, so its smallest entry is the label's. The zeros of the "
    "first layer's gradient are its ReLU mask: with public weights, inequalities on the image, which are solved.",
    what_to_do="Keep mask_gradients=True, the default. The paper's setting sends gradients in the clear, and whoever "
    "runs one of its workers has the labels and, behind a plain convolution with ReLU, the images.",
    run=run,
)
