"""Workers that pool what they see: any `colluders` of them learn nothing, one more and the image is there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.audit.attack import Attack
from darknight.audit.finding import Finding, Must, Picture
from darknight.audit.intervals import Interval, correlation_interval, share_interval
from darknight.audit.linear_decoder import best_linear_decoder, correlation
from darknight.audit.recording import Recording
from darknight.audit.scene import Scene, default_scheme
from darknight.coding import Field, Scheme, draw_code
from darknight.coding.algebra import inverse
from darknight.randomness import Randomness
from darknight.report import Row, image_rows, matrix_chart

_THRESHOLD = 0.2
_LARGEST = 5  # coefficient of a combination that is tried
_TRIED = 2  # combinations that a decoder is fitted to: those whose residues are farthest from uniform
_EXACT = 0.9  # share of pixels
_COLUMNS = 8


def run(scene: Scene) -> Sequence[Finding]:
    findings = _against(scene, "the default scheme", scene.recording(default_scheme()), pairs=True)
    if not scene.quick:
        recording = scene.recording(Scheme(inputs=2, colluders=2), "mlp", examples=480, epochs=4)
        findings += _against(scene, "a scheme for two colluders", recording, pairs=False)
    return findings


@dataclass(frozen=True, eq=False)
class _View:
    """shares: (group, worker, feature), residues. images: (group, input, *pixels). noise: coefficients by worker."""

    shares: Tensor
    images: Tensor
    noise: tuple[tuple[int, ...], ...]
    prime: int
    seed: int


def _against(scene: Scene, name: str, recording: Recording, *, pairs: bool) -> list[Finding]:
    """Every coalition that the scheme allows, and some that it does not. pairs: all of two workers, for M = 1."""
    scheme, view = recording.scheme, _view(recording, scene.seed)
    M, workers = scheme.colluders, range(scheme.workers)
    scene.tell(f"pooling the shares of {_every(M)}")
    allowed = {members: _best(view, members) for members in itertools.combinations(workers, M)}
    larger: dict[tuple[int, ...], _Reached] = {}
    if pairs:
        scene.tell("pooling the shares of every two workers")
        larger = {members: _best(view, members) for members in itertools.combinations(workers, 2)}
    strongest = max(allowed, key=lambda members: allowed[members].beforehand)
    found = allowed[strongest].found
    findings = [
        Finding(
            target=f"{name}: {_every(M)}",
            must=Must.FAIL,
            control=False,
            measure="correlation of the best coalition with an image, beyond the mean image",
            value=found.value,
            low=found.low,
            high=found.high,
            guessing=0.0,
            threshold=_THRESHOLD,
            words=f"The best of {len(allowed)} coalitions, with the shares as they are and in combinations with "
            f"coefficients up to {_LARGEST}, comes no closer to an image than chance.",
            details={
                "coalitions": len(allowed),
                "virtual batches": len(view.shares),
                "best": ", ".join(_names(scheme)[worker] for worker in strongest),
            },
            pictures=(_matrix(scheme, allowed, larger),) if pairs else (),
        )
    ]
    if pairs:
        findings.append(_of_pairs(name, scheme, larger))
    return [*findings, _with_all_carriers(name, recording, view)]


def _of_pairs(name: str, scheme: Scheme, pairs: dict[tuple[int, ...], _Reached]) -> Finding:
    weakest = min(pairs, key=lambda members: pairs[members].found.value)
    found = pairs[weakest].found
    return Finding(
        target=f"control: {name}: every two workers",
        must=Must.SUCCEED,
        control=True,
        measure="correlation of the weakest coalition with an image, beyond the mean image",
        value=found.value,
        low=found.low,
        high=found.high,
        guessing=0.0,
        threshold=_THRESHOLD,
        words=f"One worker more than the scheme allows, and the same attack works, whichever of the {len(pairs)} pairs "
        "it is: a combination exists in which the noise cancels.",
        details={"coalitions": len(pairs), "weakest": ", ".join(_names(scheme)[worker] for worker in weakest)},
    )


def _view(recording: Recording, seed: int) -> _View:
    """What workers hold of whole virtual batches; those that were padded are left out."""
    scheme, arithmetic = recording.scheme, recording.scheme.arithmetic
    assert isinstance(arithmetic, Field)
    K, shares, images = scheme.inputs, [], []
    for step in recording.steps:
        whole = len(step.examples) // K
        seen = [step.seen(worker, recording.layers[0], "forward.share")[:whole] for worker in range(scheme.workers)]
        shares.append(torch.stack([share.flatten(1) for share in seen], dim=1))
        images.append(step.images[: whole * K].reshape(whole, K, *step.images.shape[1:]))
    code = draw_code(scheme, Randomness(bytes(32)).fresh())  # the public constants, whatever the stream
    return _View(torch.cat(shares).to(torch.int64), torch.cat(images), code.A.noise, arithmetic.prime, seed)


# --- what a coalition tries -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Reached:
    """How close a coalition comes: beforehand, on the images by which it chose its way, and then on others."""

    beforehand: float
    found: Interval


def _best(view: _View, members: tuple[int, ...]) -> _Reached:
    """The way that works best for these workers, with any image of their virtual batches."""
    tried = [view.shares[:, list(members)].flatten(1)]
    tried += [_combined(view, members, coefficients) for coefficients in _most_uneven(view, members)]
    best: tuple[float, Tensor, Tensor] | None = None
    for features in tried:
        decoded = best_linear_decoder(features, view.images, prime=view.prime, seed=view.seed)
        rebuilt, truth = decoded.images - decoded.mean, view.images[decoded.examples] - decoded.mean
        half = len(truth) // 2
        for place in range(truth.shape[1]):
            beforehand = correlation(rebuilt[:half, place], truth[:half, place])
            if best is None or beforehand > best[0]:
                best = beforehand, rebuilt[half:, place], truth[half:, place]
    assert best is not None
    return _Reached(best[0], correlation_interval(best[1], best[2], seed=view.seed))


def _most_uneven(view: _View, members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Of all combinations worth trying, those whose residues are smallest: without noise they would be near zero."""
    combinations = [*_small(len(members)), *_multiples(view, len(members)), *_without_noise(view, members)]
    candidates = dict.fromkeys(tuple(value % view.prime for value in each) for each in combinations)
    size = {
        each: float(_centred(_combined(view, members, each), view.prime).double().abs().mean()) for each in candidates
    }
    return sorted(size, key=lambda each: size[each])[:_TRIED]


def _small(count: int) -> list[tuple[int, ...]]:
    """Coefficients up to the largest, without multiples of each other."""
    every = itertools.product(range(-_LARGEST, _LARGEST + 1), repeat=count)
    return [each for each in every if math.gcd(*each) == 1 and next(value for value in each if value) > 0]


def _multiples(view: _View, count: int) -> list[tuple[int, ...]]:
    """Of a single share: twice, thrice .. it, a half, a third .. of it in the field."""
    if count > 1:
        return []
    factors = range(2, max(_LARGEST, view.images.shape[1] + 1) + 1)
    return [(value,) for factor in factors for value in (factor, pow(factor, -1, view.prime))]


def _without_noise(view: _View, members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The combination in which all noise cancels, if they are one more than it takes; and its multiples."""
    first, *others = (view.noise[member] for member in members)
    if len(others) != len(first):
        return []
    solved = inverse(others, view.prime)
    assert solved is not None  # the scheme would not have been constructed
    rest = [-sum(int(a) * int(b) for a, b in zip(first, column, strict=True)) for column in zip(*solved, strict=True)]
    return [tuple(factor * value % view.prime for value in (1, *rest)) for factor in range(1, view.images.shape[1] + 2)]


def _combined(view: _View, members: tuple[int, ...], coefficients: tuple[int, ...]) -> Tensor:
    total = torch.zeros(view.shares.shape[0], *view.shares.shape[2:], dtype=torch.int64)
    for member, coefficient in zip(members, coefficients, strict=True):
        total = (total + view.shares[:, member] * coefficient) % view.prime
    return total


def _centred(residues: Tensor, prime: int) -> Tensor:
    return torch.where(residues > prime // 2, residues - prime, residues)


# --- one worker too many ----------------------------------------------------------------------------------------------
def _with_all_carriers(name: str, recording: Recording, view: _View) -> Finding:
    """A data worker and all carriers of r: subtracting the noise leaves the image that was sent, to the last bit."""
    scheme = recording.scheme
    K, M = scheme.inputs, scheme.colluders
    members = (0, *range(K + M, K + 2 * M))
    (exact, *_) = _without_noise(view, members)
    integers = _centred(_combined(view, members, exact), view.prime).view(view.images[:, 0].shape)
    images = view.images[:, 0]
    right = _as_sent(integers, images)
    hits, pixels = int(right.sum()), right.numel()
    found = share_interval(hits, pixels)
    modes = (images == images.flatten(1).mode(dim=0).values.view(images.shape[1:])).double().mean()
    span = float(images.min()), float(images.max())
    shown = slice(None, _COLUMNS)
    carriers = "the carrier of r" if M == 1 else f"all carriers of r, {M} of them"
    rows = [
        Row(title="Original", subtitle="stays in the enclave", images=images[shown], span=span),
        Row(title="Data worker's share", subtitle="image plus noise", images=_pictures(view, members[0])[shown]),
        Row(title="A carrier's share", subtitle="noise", images=_pictures(view, members[1])[shown]),
        Row(title="Together", subtitle="noise subtracted", images=integers[shown]),
    ]
    return Finding(
        target=f"control: {name}: a data worker with {carriers}",
        must=Must.SUCCEED,
        control=True,
        measure="share of pixels that are exactly those that were sent",
        value=found.value,
        low=found.low,
        high=found.high,
        guessing=float(modes),
        threshold=max(_EXACT, float(modes)),
        words=f"{_count(M + 1).capitalize()} are one too many: they subtract the noise and have the image itself. "
        "This is why each worker needs an operator of its own.",
        details={"workers": M + 1, "images": len(images), "pixels": pixels},
        pictures=(
            Picture(
                title=f"A data worker with {carriers}",
                caption="One share alone is noise. Together they are the image.",
                png=image_rows(rows),
            ),
        ),
    )


def _as_sent(integers: Tensor, images: Tensor) -> Tensor:
    """Which pixels are right: each is the image times some power of two, rounded. The power that fits best counts."""
    tries = [(images.double() * 2.0**exponent).round() == integers for exponent in range(-8, 24)]
    return max(tries, key=lambda right: int(right.sum()))


def _pictures(view: _View, worker: int) -> Tensor:
    return _centred(view.shares[:, worker], view.prime).view(view.images[:, 0].shape)


# --- words and pictures -----------------------------------------------------------------------------------------------
def _matrix(scheme: Scheme, alone: dict[tuple[int, ...], _Reached], pairs: dict[tuple[int, ...], _Reached]) -> Picture:
    size = scheme.workers
    values: list[list[float | None]] = [[None] * size for _ in range(size)]
    for worker in range(size):
        values[worker][worker] = max(0.0, alone[(worker,)].found.value)
    for (first, second), reached in pairs.items():
        values[first][second] = values[second][first] = max(0.0, reached.found.value)
    return Picture(
        title="Alone, and in pairs",
        caption="Correlation with an image: of each worker alone, on the diagonal, and of each two that pool "
        "what they hold. The scheme promises the diagonal, and nothing about pairs.",
        png=matrix_chart(values, labels=_names(scheme), legend="correlation with an image"),
    )


def _names(scheme: Scheme) -> list[str]:
    K, M = scheme.inputs, scheme.colluders
    numbers = range(1, M + 1)
    return [
        *(f"data {place}" for place in range(1, K + 1)),
        *("carrier of s" if M == 1 else f"carrier of s{number}" for number in numbers),
        *("carrier of r" if M == 1 else f"carrier of r{number}" for number in numbers),
    ]


def _every(workers: int) -> str:
    return "each worker alone" if workers == 1 else f"every {_count(workers)}"


def _count(workers: int) -> str:
    return {1: "one worker", 2: "two workers", 3: "three workers"}.get(workers, f"{workers} workers")


ATTACK = Attack(
    key="coalitions",
    title="Coalitions of workers",
    question="What do workers learn that pool everything they hold?",
    how="For every coalition that the scheme allows, the best linear decoder gets all its shares, and the combinations "
    "of them modulo the prime whose residues are farthest from uniform. Then the coalitions are made one larger.",
    what_to_do="Give each worker an operator of its own, or use a scheme with as many colluders as one operator has "
    "workers. A fleet file that breaks this is refused.",
    run=run,
)
