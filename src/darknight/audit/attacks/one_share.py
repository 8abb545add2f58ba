"""One share against the image behind it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from darknight.audit.attack import Attack
from darknight.audit.broken import Fault, broken_sent, broken_shares
from darknight.audit.finding import Finding, Must, Picture
from darknight.audit.intervals import correlation_interval, mean_interval
from darknight.audit.likeness import structural_similarity
from darknight.audit.linear_decoder import Reconstruction, best_linear_decoder, readings
from darknight.audit.neural_decoder import Decoded, trained_decoder
from darknight.audit.recording import Recording, Sent, Step
from darknight.audit.scene import Scene, default_scheme
from darknight.coding import Real, Scheme
from darknight.report import Row, image_rows

_CORRELATION = 0.2  # a twenty-fifth of the variance
_LIKENESS = 0.05  # above that of the mean image
_GOOD = 0.5  # structural similarity that a decoder reaches where there is something to decode
_COLUMNS = 8
_BARE = "control: the default scheme without noise"


def run(scene: Scene) -> Sequence[Finding]:
    default, paper = scene.recording(default_scheme()), scene.recording(Scheme.paper())
    ours = _Target(scene, default, default.sent(), "the default scheme")
    bare = _Target(scene, default, broken_sent(default, Fault.NO_NOISE, seed=scene.seed), _BARE, broken=True)
    # The paper's code mixes images with secret coefficients, fresh for each call: nothing for a linear map.
    theirs = _Target(scene, paper, paper.sent(), "the paper's scheme")
    floats = _Target(scene, paper, paper.sent(_floats_without_noise), "control: floats without noise", broken=True)
    return [
        *(each for target in (ours, bare) for each in (target.plain(), *target.decoded())),
        *(target.decoded()[-1] for target in (theirs, floats)),
    ]


def _floats_without_noise(number: int, step: Step) -> Tensor:
    floats = Scheme(inputs=Scheme.paper().inputs, colluders=1, arithmetic=Real(noise_std=1.0))
    return broken_shares(step.images, floats, Fault.NO_NOISE, seed=number)


class _Target:
    """Shares and their images, and what decoders make of them."""

    def __init__(self, scene: Scene, recording: Recording, sent: Sent, name: str, *, broken: bool = False) -> None:
        self._scene, self._prime, self._sent, self._broken = scene, recording.prime, sent, broken
        self._inputs = recording.scheme.inputs
        self._mixed = recording.scheme.mixing == "dense" and not broken
        self._target = name
        self._must = Must.SUCCEED if broken else Must.FAIL

    def plain(self) -> Finding:
        """The share as it is, pixel by pixel."""
        sent = self._sent
        shares = self._plainest(slice(None))
        images = (sent.images - sent.images.mean(dim=0)).flatten(1)
        found = correlation_interval(shares - shares.mean(dim=0), images, clusters=sent.examples, seed=self._scene.seed)
        return self._finding(
            "the share itself",
            measure="correlation of a share with its image",
            found=(found.value, found.low, found.high),
            guessing=0.0,
            threshold=_CORRELATION,
            words="The share is the image: nothing was added to it."
            if self._broken
            else "Seen as numbers around zero, shares have nothing in common with the images behind them.",
            details={"shares": len(sent.shares)},
        )

    def _plainest(self, chosen: Tensor | slice) -> Tensor:
        """Shares as numbers around zero."""
        return next(iter(readings(self._sent.shares[chosen].flatten(1), self._prime).values()))

    def decoded(self) -> list[Finding]:
        """By the best linear decoder, and by a network."""
        sent, seed = self._sent, self._scene.seed
        self._scene.tell(f"training decoders: {self._target}")
        epochs = 12 if self._scene.quick else 20
        linear = best_linear_decoder(sent.shares, sent.images, prime=self._prime, seed=seed, examples=sent.examples)
        neural = trained_decoder(
            *(sent.shares, sent.images), prime=self._prime, seed=seed, examples=sent.examples, epochs=epochs
        )
        return [self._of_linear(linear), self._of_neural(neural, linear, epochs)]

    def _of_linear(self, linear: Reconstruction) -> Finding:
        sent, hidden = self._sent, linear.examples
        found = correlation_interval(
            linear.images - linear.mean,
            sent.images[hidden] - linear.mean,
            clusters=sent.examples[hidden],
            seed=self._scene.seed,
        )
        return self._finding(
            "linear decoder",
            measure="correlation of the best linear decoder's images, beyond the mean image",
            found=(found.value, found.low, found.high),
            guessing=0.0,
            threshold=_CORRELATION,
            words="The decoder was told the images behind half of the shares, and rebuilds the others."
            if self._broken
            else "Told the images behind half of the shares, the decoder rebuilds of the others the mean image.",
            details={"shares": len(sent.shares), "of them to try it on": len(hidden), "best reading": linear.features},
        )

    def _of_neural(self, neural: Decoded, linear: Reconstruction, epochs: int) -> Finding:
        sent, hidden, seed = self._sent, neural.examples, self._scene.seed
        truth, owners = sent.images[hidden], sent.examples[hidden]
        span = float(sent.images.max() - sent.images.min())
        found = mean_interval(structural_similarity(neural.images, truth, span=span), clusters=owners, seed=seed)
        mean = neural.mean.expand_as(truth)
        guessing = float(structural_similarity(mean, truth, span=span).mean())
        return self._finding(
            "trained network",
            measure="structural similarity (SSIM) of a trained network's images",
            found=(found.value, found.low, found.high),
            guessing=guessing,
            threshold=max(_GOOD, guessing + _LIKENESS) if self._broken else guessing + _LIKENESS,
            words="With the same budget, the network rebuilds images that it was not shown."
            if self._broken
            else "Nothing that the network learned helps on images that it was not shown: the mean image is its best.",
            details={"shares": len(sent.shares), "of them to try it on": len(hidden), "epochs": epochs},
            pictures=(self._picture(neural, linear),),
        )

    def _picture(self, neural: Decoded, linear: Reconstruction) -> Picture:
        sent, shown = self._sent, neural.examples[:_COLUMNS]
        truth = sent.images[shown]
        span = float(truth.min()), float(truth.max())
        mixed = f"; each share is a mixture of {self._inputs} images, of which the first is shown" * self._mixed
        rows = [
            Row(title="Original", subtitle="stays in the enclave", images=truth, span=span),
            Row(title="What a worker received", subtitle="its share", images=self._plainest(shown).view_as(truth)),
            Row(title="Best linear decoder", subtitle="", images=linear.images[:_COLUMNS], span=span),
            Row(title="Trained network", subtitle="", images=neural.images[:_COLUMNS], span=span),
        ]
        caption = f"Images that no decoder was shown, the shares of them, and what decoders make of those{mixed}."
        return Picture(title=self._target.capitalize(), caption=caption, png=image_rows(rows))

    def _finding(
        self,
        way: str,
        *,
        measure: str,
        found: tuple[float, float, float],
        guessing: float,
        threshold: float,
        words: str,
        details: dict[str, float | int | str],
        pictures: tuple[Picture, ...] = (),
    ) -> Finding:
        value, low, high = found
        return Finding(
            target=f"{self._target}: {way}",
            must=self._must,
            control=self._broken,
            measure=measure,
            value=value,
            low=low,
            high=high,
            guessing=guessing,
            threshold=threshold,
            words=words,
            details=details,
            pictures=pictures,
        )


ATTACK = Attack(
    key="one-share",
    title="One share against the image",
    question="Can a worker see the image in the share that it was sent?",
    how="A worker's shares of the first layer are compared with the images behind them. Then two decoders, the best "
    "linear one and a small network, are told the images behind half of the shares and have to rebuild the rest.",
    what_to_do="Nothing, if both fail. If one succeeds, do not train: noise is missing, reused or too small.",
    run=run,
)
