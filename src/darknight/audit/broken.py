"""Shares of deliberately broken schemes, for controls: an attack that fails on these proves nothing.

The shares come from the real encoders of darknight.coding, given a mixing or a stream that the product never gives
them. Only too little noise could a user ask for, in real arithmetic, with a bound that says what it costs.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor

from darknight.audit.recording import Recording, Sent, Step
from darknight.coding import Field, Mixing, Real, Scheme, draw_code, field, real, virtual_batches
from darknight.coding.fixed_point import exponent_for, largest_magnitude, quantise_nearest
from darknight.randomness import Randomness, Stream


class Fault(StrEnum):
    """What is wrong with a scheme."""

    NO_NOISE = "no noise"
    REUSED_NOISE = "reused noise"
    WEAK_NOISE = "Gaussian noise of twice the largest value"


def broken_shares(batch: Tensor, scheme: Scheme, fault: Fault, *, seed: int) -> Tensor:
    """(example, *feature) -> (worker, group, *feature), as on the wire. The same seed gives the same noise.

    REUSED_NOISE: the same noise for every virtual batch of every call with this seed. WEAK_NOISE: in real arithmetic,
    whatever the scheme's is.
    """
    if fault is Fault.WEAK_NOISE:
        scheme = replace(scheme, arithmetic=Real(noise_std=2.0))
    randomness = Randomness(seed.to_bytes(32, "big"))
    mixing = draw_code(scheme, randomness.fresh()).A
    if fault is Fault.NO_NOISE:
        mixing = replace(mixing, noise=tuple((0,) * mixing.colluders for _ in mixing.noise))
    groups = virtual_batches(batch, scheme.inputs)
    if fault is Fault.REUSED_NOISE:
        number = randomness.fresh().number
        parts = [_encoded(mixing, group, scheme, randomness.replay(number), batch) for group in torch.split(groups, 1)]
        return torch.cat(parts, dim=1)
    return _encoded(mixing, groups, scheme, randomness.fresh(), batch)


def broken_sent(recording: Recording, fault: Fault, *, seed: int) -> Sent:
    """What data workers would have received in a recorded training, had its scheme been broken in this way."""

    def shares(number: int, step: Step) -> Tensor:
        again = seed if fault is Fault.REUSED_NOISE else seed + number
        return broken_shares(step.images, recording.scheme, fault, seed=again)

    return recording.sent(shares)


def quantised(batch: Tensor, arithmetic: Field) -> Tensor:
    """The integers that a field layer masks, at the scale that the runtime would choose."""
    return quantise_nearest(batch, exponent_for(largest_magnitude(batch), arithmetic.bits))


def _encoded(mixing: Mixing, groups: Tensor, scheme: Scheme, stream: Stream, batch: Tensor) -> Tensor:
    arithmetic = scheme.arithmetic
    largest = largest_magnitude(batch)
    if isinstance(arithmetic, Field):
        integers = quantise_nearest(groups, exponent_for(largest, arithmetic.bits))
        return field.encode(mixing, integers, arithmetic.prime, stream)
    return real.encode(mixing, groups, real.grid_for(mixing, arithmetic, largest), stream, arithmetic.dtype)
