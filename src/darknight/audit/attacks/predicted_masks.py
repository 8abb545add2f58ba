"""Masks predicted from masks that were seen: torch's generator, and ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from darknight.audit.attack import Attack
from darknight.audit.broken import quantised
from darknight.audit.finding import Finding, Must, Picture
from darknight.audit.intervals import share_interval
from darknight.audit.recording import Recording
from darknight.audit.scene import Scene, default_scheme
from darknight.audit.twister import NEEDED, Twister, recovered
from darknight.coding import Field, Scheme, draw_code, field, virtual_batches
from darknight.randomness import Branch, Randomness
from darknight.report import Row, image_rows

_PREDICTED = 0.5  # share of masks, between guessing and knowing
_IMAGES, _SHOWN = 64, 8


class TorchMasks(Branch):
    """Masks by torch.randint, as a careless implementation would make them: one generator, one draw after another."""

    def __init__(self, prime: int) -> None:
        super().__init__(bytes(32))
        self._prime = prime
        self._generator = torch.Generator()
        self._generator.seed()  # from the operating system: the seed is not what is guessed

    def words(self, count: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        masks = torch.randint(self._prime, (count,), dtype=dtype, generator=self._generator)
        return masks if out is None else out.copy_(masks)

    def branches(self, count: int) -> list[Branch]:
        return [self] * count


def run(scene: Scene) -> Sequence[Finding]:
    scene.tell("predicting masks")
    return _control(scene), _ours(scene.recording(default_scheme()))


def predicted(seen: Tensor, prime: int, count: int) -> tuple[Tensor, int]:
    """The next `count` masks after those that were seen, and how many relations of the generator those satisfy.

    Where no generator of torch's kind gives what was seen, one with an arbitrary state guesses.
    """
    twister, relations = recovered(seen.flatten()[-NEEDED:].to(torch.int64).numpy(), prime)
    twister = twister or Twister(np.arange(NEEDED // 2, dtype=np.uint32))
    return torch.from_numpy(twister.below(prime, count)), relations


# --- control: torch's generator ---------------------------------------------------------------------------------------
def _control(scene: Scene) -> Finding:
    """The worker that carries the noise of gradients sees it bare; of the next batch it gets x + 2 r."""
    scheme = replace(default_scheme(), inputs=1)
    prime, carrier = _prime(scheme), scheme.inputs
    code, stream = draw_code(scheme, Randomness(bytes(32)).fresh()), TorchMasks(prime)
    images = scene.images[:_IMAGES]
    groups = virtual_batches(quantised(images, _field(scheme)), scheme.inputs)
    # Whatever the gradients are, its share of them is their noise.
    gradients = torch.zeros(-(-NEEDED // images[0].numel()), *groups.shape[1:], dtype=torch.int32)
    seen = field.encode(code.B, gradients, prime, stream, rows=[carrier])[0]
    share = field.encode(code.A, groups, prime, stream, rows=[carrier])[0]
    guessed, relations = predicted(seen, prime, share.numel())
    (data,), (noise,) = code.A.data[carrier], code.A.noise[carrier]
    assert data == 1
    left = (share.to(torch.int64) - noise * guessed.view(share.shape)).remainder(prime)
    left = left - prime * (left > prime // 2)
    truth = groups[:, 0]
    right = int((left == truth).sum())
    picture = _picture(images, share, left)
    return _finding(
        "control: the default code, with one input and masks from torch.randint",
        right,
        truth.numel(),
        relations,
        prime,
        control=True,
        words="From 1,248 masks that one worker carries anyway, the state of torch's generator follows, and from it "
        "all masks that it will make: this worker then reads images off its own share, to the last bit.",
        pictures=(picture,),
    )


# --- ours -------------------------------------------------------------------------------------------------------------
def _ours(recording: Recording) -> Finding:
    """From the noise of a step's gradients, as its carrier saw it, to that of the next step's inputs.

    What the carrier of the inputs' noise saw then is the truth.
    """
    scheme, layer = recording.scheme, recording.layers[0]
    prime, carrier = _prime(scheme), scheme.inputs
    right, tried, relations = 0, 0, 0
    for step, following in zip(recording.steps, recording.steps[1:], strict=False):
        seen = step.seen(carrier, layer, "backward.share")
        if seen.numel() < NEEDED:  # the rest of an epoch
            continue
        truth = following.seen(carrier + scheme.colluders, layer, "forward.share").flatten()
        guessed, fitting = predicted(seen, prime, len(truth))
        right, tried, relations = right + int((guessed == truth).sum()), tried + len(truth), max(relations, fitting)
    return _finding(
        "the default scheme, recorded",
        right,
        tried,
        relations,
        prime,
        control=False,
        words="Masks are AES-256-CTR under a key from the operating system. What a worker saw of them fits no state of "
        "torch's generator, and predicts none of the next ones.",
    )


def _finding(
    target: str,
    right: int,
    tried: int,
    relations: int,
    prime: int,
    *,
    control: bool,
    words: str,
    pictures: tuple[Picture, ...] = (),
) -> Finding:
    found = share_interval(right, tried)
    return Finding(
        target=target,
        must=Must.SUCCEED if control else Must.FAIL,
        control=control,
        measure="next masks predicted exactly",
        value=found.value,
        low=found.low,
        high=found.high,
        guessing=1 / prime,
        threshold=_PREDICTED,
        words=words,
        details={"masks seen": NEEDED, "masks to predict": tried, f"relations that hold, of {NEEDED // 2}": relations},
        pictures=pictures,
    )


def _picture(images: Tensor, share: Tensor, left: Tensor) -> Picture:
    rows = [
        Row(title="Original", subtitle="stays in the enclave", images=images[:_SHOWN]),
        Row(title="What the worker got", subtitle="its share", images=share[:_SHOWN].to(torch.float64)),
        Row(title="Less predicted masks", subtitle="what it can read", images=left[:_SHOWN].to(torch.float64)),
    ]
    return Picture(
        title="Masks from torch's generator, predicted",
        caption="The worker that carries the gradients' noise also holds the image under other noise. With more "
        "inputs in a masking, it is their sum.",
        png=image_rows(rows),
    )


def _field(scheme: Scheme) -> Field:
    assert isinstance(scheme.arithmetic, Field)
    return scheme.arithmetic


def _prime(scheme: Scheme) -> int:
    return _field(scheme).prime


ATTACK = Attack(
    key="predicted-masks",
    title="Masks predicted from earlier masks",
    question="Can somebody who has seen some masks predict the next ones?",
    how="Torch's generator on the CPU is the Mersenne Twister: 1,248 of its outputs modulo the prime give its state, "
    "and the state gives all that follow. The worker that carries a noise row sees that many in one layer.",
    what_to_do="Nothing: masks come from AES-256-CTR, keyed by the operating system, and a test keeps every other "
    "generator out of the trusted rooms. Never mask with the generators of torch, numpy or Python.",
    run=run,
)
