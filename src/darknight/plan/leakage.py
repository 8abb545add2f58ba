"""What Real shares tell about one example, and the least noise that keeps it within a target.

    nats = times sent * sum over layers of (numbers in its input * a + numbers in its gradient * b)

a and b are what the worst coalition of M workers learns at most of one number of an input, and of a gradient
(accounting.worst_coalition). Noise is sigma times the layer's bound, so they depend on sigma and the code alone.
An example is sent once an epoch. Re-maskings after a failure come on top, and so does activation checkpointing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from darknight.accounting import worst_coalition
from darknight.coding import Code
from darknight.errors import SchemeError
from darknight.plan.candidate import Candidate
from darknight.plan.layers import Network, Product

_DIGITS = 4  # of a noise that somebody has to type
_CLOSE = 1e-7
_LEAST_NOISE, _MOST_NOISE = 1.0, 1e7  # Real accepts nothing beyond them


@dataclass(frozen=True, kw_only=True)
class Nats:
    """About one number of an input, and of a gradient, in one sending."""

    input: float = 0.0
    gradient: float = 0.0

    def of(self, product: Product) -> float:
        """About one example in one call of the layer."""
        return product.inputs * self.input + product.outputs * self.gradient


def nats_of(code: Code, noise_std: float) -> Nats:
    found = [worst_coalition(mixing, bound=1.0, noise_std=noise_std)[1] for mixing in code.masking]
    return Nats(input=found[0], gradient=found[1] if code.masks_gradients else 0.0)


def nats_per_sending(network: Network, nats: Nats) -> float:
    """About one example in one step."""
    return sum(count * nats.of(product) for product, count in network.distinct.items())


def least_noise(network: Network, candidate: Candidate, times: int, target: float) -> float:
    """The smallest noise that keeps `times` sendings within the target, rounded up to digits that can be typed.

    Leakage is c / sigma^2, with a c that grows with sigma and never exceeds half a nat a number (a coalition's factor
    is at most 1). So sigma = sqrt(c / target) with that largest c meets the target, and with the c of the sigma
    before it goes down from there to the least one, meeting the target all the way.

    It may be more than any scheme accepts: constructing the scheme says so. Raises SchemeError for unknown codes.
    """
    code = candidate.code()
    numbers = sum(product.inputs + product.outputs for product in network.products)
    best, noise = math.inf, max(_LEAST_NOISE, (1 + _CLOSE) * math.sqrt(times * numbers / (2 * target)))
    if noise > _MOST_NOISE:
        return rounded_up(noise)
    while noise < best * (1 - _CLOSE):
        total = times * nats_per_sending(network, nats_of(code, noise))
        if total > target:  # by rounding, which has its say where leakage is 1e-13 of a nat
            break
        best, noise = noise, max(_LEAST_NOISE, noise * math.sqrt(total / target))
    return rounded_up(best)


def most_noise(candidate: Candidate) -> float | None:
    """The largest noise with which the candidate's scheme constructs, by bisection; None if there is none."""
    if not _constructs(candidate, _LEAST_NOISE):
        return None
    low, high = _LEAST_NOISE, _MOST_NOISE
    while high > low * (1 + _CLOSE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _constructs(candidate, middle) else (low, middle)
    return low


def _constructs(candidate: Candidate, noise: float) -> bool:
    try:
        candidate.scheme(noise)
    except SchemeError:
        return False
    return True


def rounded_up(value: float, digits: int = _DIGITS) -> float:
    """At least `value`, in few digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    near = float(f"{value:.{digits}g}")
    return near if near >= value else float(f"{near + step:.{digits}g}")
