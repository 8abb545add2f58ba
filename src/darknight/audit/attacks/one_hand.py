"""All shares of a masking in one hand: what every guarantee assumes away, and why operators must be separate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from darknight.audit.attack import Attack
from darknight.audit.broken import quantised
from darknight.audit.finding import Finding, Must, Picture
from darknight.audit.intervals import correlation_interval
from darknight.audit.lattice import short_combinations
from darknight.audit.pairing import paired
from darknight.audit.recording import Recording
from darknight.audit.scene import Scene, default_scheme
from darknight.audit.separation import told_apart
from darknight.coding import Field, Scheme, draw_code, field, virtual_batches
from darknight.randomness import Randomness
from darknight.report import Row, image_rows

_DENSE = Scheme(inputs=3, colluders=1, mixing="dense")
_COLUMNS = 20  # features on which the lattice is searched
_BATCH = 96
_SHOWN = 8
_REBUILT = 0.5  # correlation, between guessing and a copy
_LOPSIDED = 0.05  # how far the middle of a range is from zero, in ranges, for its sign to be telling


def run(scene: Scene) -> Sequence[Finding]:
    scene.tell("pooling all shares")
    ours, paper = scene.recording(default_scheme()), scene.recording(Scheme.paper())
    return (
        _default(scene, ours),
        _dense_field(scene),
        _paper(scene, paper),
        _one_share(scene, ours),
    )


# --- the default scheme: public coefficients --------------------------------------------------------------------------
def _default(scene: Scene, recording: Recording) -> Finding:
    step, scheme = recording.steps[0], recording.scheme
    shares = torch.stack(_all_shares(recording))
    assert recording.prime is not None
    rebuilt = field.decode(draw_code(scheme, Randomness(bytes(32)).fresh()).A, dict(enumerate(shares)), recording.prime)
    known = scene.images[len(step.images) :]
    scale = float(known.max() - known.min()) / float(
        rebuilt.max() - rebuilt.min()
    )  # a power of two that was never sent
    return _finding(
        scene,
        rebuilt.transpose(0, 1).flatten(2) * scale,
        step.images,
        target="control: the default scheme, all shares of a recorded step",
        words="Coefficients of the default code are public: subtract the noise row that one worker carries from the "
        "share of another, and the image is there, to the last bit.",
        shares=shares[:, 0],
    )


# --- dense code in a field: secret coefficients -----------------------------------------------------------------------
def _dense_field(scene: Scene) -> Finding:
    arithmetic, randomness = _DENSE.arithmetic, Randomness.from_operating_system()
    assert isinstance(arithmetic, Field)
    images = scene.images[: _BATCH // _DENSE.inputs * _DENSE.inputs]
    groups = virtual_batches(quantised(images, arithmetic), _DENSE.inputs)
    shares = field.encode(draw_code(_DENSE, randomness.fresh()).A, groups, arithmetic.prime, randomness.fresh())
    known = scene.images[len(images) :]
    return _finding(
        scene,
        upright(unmixed_field(shares.flatten(2), arithmetic.prime, known, _DENSE.inputs, scene.seed), known),
        images,
        target="control: the field with secret coefficients, all shares of a masking",
        words="Secret coefficients do not help. The combinations of all shares form a lattice, whose shortest vectors "
        "are without noise: lattice reduction finds these in less than a second, and the images in them.",
        shares=shares[:, 0],
    )


def unmixed_field(shares: Tensor, prime: int, known: Tensor, inputs: int, seed: int) -> Tensor:
    """(worker, group, feature) residues of the dense code -> (input, group, feature), as `told_apart` leaves them.

    known: other images of the kind. The lattice is searched where those differ, not in a background.
    """
    variety = known.flatten(1).to(torch.float64).var(dim=0).repeat(shares.shape[1])
    columns = torch.multinomial(variety, _COLUMNS, generator=torch.Generator().manual_seed(seed))
    mixtures = short_combinations(shares.flatten(1), prime, count=inputs, columns=columns.tolist())
    return told_apart(mixtures.view(inputs, *shares.shape[1:]))


# --- dense code of real numbers: the paper's --------------------------------------------------------------------------
def _paper(scene: Scene, recording: Recording) -> Finding:
    step, scheme = recording.steps[0], recording.scheme
    shares = torch.stack(_all_shares(recording))
    return _finding(
        scene,
        upright(unmixed_real(shares[: scheme.base_workers].flatten(2)), scene.images[len(step.images) :]),
        step.images,
        target="control: the paper's setting, all shares of a recorded step",
        words="The noise is the same in all shares but for its sign, so it cancels. What is left are mixtures of the "
        "images, and images are told apart from mixtures by their narrower range.",
        shares=shares[:, 0],
    )


def unmixed_real(shares: Tensor) -> Tensor:
    """(worker, group, feature) of the dense real code's base rows -> (input, group, feature), as `told_apart` does.

    The noise column of the code is flat, +-1 / sqrt(workers), so what is orthogonal to its signs is without noise.
    """
    rows = shares.to(torch.float64).flatten(1)
    signs = torch.sign(rows @ rows[0])  # of the noise, which drowns everything else
    identity = torch.eye(len(rows), dtype=torch.float64)
    basis = torch.linalg.qr(torch.cat([signs[:, None], identity], dim=1)).Q
    return told_apart((basis[:, 1:].T @ rows).view(-1, *shares.shape[1:]))


# --- one share: as much as an operator may have -----------------------------------------------------------------------
def _one_share(scene: Scene, recording: Recording) -> Finding:
    step, scheme = recording.steps[0], recording.scheme
    share = _all_shares(recording)[:1]
    assert recording.prime is not None
    known = scene.images[len(step.images) :]
    return _finding(
        scene,
        upright(unmixed_field(torch.stack(share).flatten(2), recording.prime, known, 1, scene.seed), known),
        step.images[:: scheme.inputs],
        target="the default scheme, one share: what one operator may have",
        words="The same lattice reduction on the shares of one worker finds nothing that is shorter than chance.",
        shares=share[0][:1],
        must=Must.FAIL,
    )


# --- all of them ------------------------------------------------------------------------------------------------------
def _all_shares(recording: Recording) -> list[Tensor]:
    """What each worker saw of the first layer's input in the first step, (group, *feature)."""
    step = recording.steps[0]
    return [step.seen(worker, recording.layers[0], "forward.share") for worker in range(recording.scheme.workers)]


def upright(rebuilt: Tensor, known: Tensor) -> Tensor:
    """(input, group, feature) with the sign and the range that known images have."""
    low, high = float(known.min()), float(known.max())
    darkest, brightest = rebuilt.to(torch.float64).flatten(1).aminmax(dim=1)
    if abs(low + high) > _LOPSIDED * (high - low):
        likeness = (darkest + brightest) * (low + high)  # the middle of the range is on the same side of zero
    else:
        mean = known.mean(dim=0).flatten().to(torch.float64)
        likeness = rebuilt.to(torch.float64).mean(dim=1) @ (mean - mean.mean())  # the average image looks the same
    signs = torch.where(likeness >= 0, 1.0, -1.0)
    return rebuilt * (signs * (high - low) / (brightest - darkest))[:, None, None]


def _finding(
    scene: Scene,
    rebuilt: Tensor,
    truth: Tensor,
    *,
    target: str,
    words: str,
    shares: Tensor,
    must: Must = Must.SUCCEED,
) -> Finding:
    """rebuilt: (input, group, feature), of unknown order. shares: (worker, *feature) of one masking."""
    inputs, groups, features = rebuilt.shape
    rows = virtual_batches(truth, inputs).transpose(0, 1).flatten(1)
    images = paired(rebuilt.flatten(1), rows).view(inputs, groups, features)
    images = images.transpose(0, 1).reshape(-1, *truth.shape[1:])[: len(truth)].to(torch.float32)
    # Without what all of them have in common: a fixed picture, the average image or any other, must count for nothing.
    found = correlation_interval(images - images.mean(dim=0), truth - truth.mean(dim=0), seed=scene.seed)
    return Finding(
        target=target,
        must=must,
        control=must is Must.SUCCEED,
        measure="correlation of rebuilt and true images, beyond the average image",
        value=found.value,
        low=found.low,
        high=found.high,
        guessing=0.0,
        threshold=_REBUILT,
        words=words,
        details={"images": len(truth), "images in a masking": inputs, "shares": len(shares)},
        pictures=(_picture(truth, shares, images, target),),
    )


def _picture(truth: Tensor, shares: Tensor, rebuilt: Tensor, target: str) -> Picture:
    span = float(truth.min()), float(truth.max())
    rows = [
        Row(title="Original", subtitle="stays in the enclave", images=truth[:_SHOWN], span=span),
        Row(title="Shares that it has", subtitle="of the first masking", images=shares[:_SHOWN].to(torch.float64)),
        Row(title="Rebuilt", subtitle="from these shares alone", images=rebuilt[:_SHOWN], span=span),
    ]
    return Picture(
        title=target.removeprefix("control: ").capitalize(),
        caption="When all shares of a masking come together, no noise is left. One share is all noise.",
        png=image_rows(rows),
    )


ATTACK = Attack(
    key="one-hand",
    title="All shares in one hand",
    question="What if one party runs all the workers, or watches all the links?",
    how="With public coefficients the noise is subtracted. With secret ones, lattice reduction (field) and source "
    "separation (real numbers) find the images without knowing the coefficients.",
    what_to_do="Run workers at separate operators, at most as many shares of a masking at one as `colluders` says, and "
    "keep links encrypted under keys of their own. A fleet file that breaks this does not construct; a local fleet, "
    "which is in one hand, is for trying things out.",
    run=run,
)
