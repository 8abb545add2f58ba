"""The two arithmetics of a scheme."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from darknight.errors import SchemeError

PRIME_25 = 2**25 - 39
PRIME_28 = 2**28 - 57
# The second prime of each field, in which a wrap-around modulo the first one shows.
WITNESS = {PRIME_25: 2**25 - 49, PRIME_28: 2**28 - 89}

_BITS = {PRIME_25: range(4, 12), PRIME_28: range(4, 13)}
_MOST_NOISE = 4e6  # there the bound C1^2 / (2 sigma^2) meets the resolution of randomness.grid_gaussian
_CARRIED_BITS = 6  # what must be left of an input, in bits, once it is added to the largest noise


@dataclass(frozen=True)
class Field:
    """Fixed-point integers modulo a prime: uniform noise, exact decoding, no leakage from shares.

    `bits` are the magnitude bits of a quantised value.
    """

    prime: int = PRIME_28
    bits: int = 10

    def __post_init__(self) -> None:
        if self.prime not in WITNESS:
            known = " or ".join(f"{prime}" for prime in WITNESS)
            raise SchemeError(f"prime {self.prime!r}; use {known} (2^25 - 39 or 2^28 - 57).")
        allowed = _BITS[self.prime]
        if not is_whole(self.bits) or self.bits not in allowed:
            raise SchemeError(f"bits={self.bits!r}; this prime carries {allowed.start} to {allowed.stop - 1} bits.")


@dataclass(frozen=True)
class Real:
    """The paper's arithmetic: floats with Gaussian noise of noise_std (and noise_mean) times the input's bound."""

    noise_std: float
    noise_mean: float = 0.0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise SchemeError(f"dtype {self.dtype}; Real workers compute in torch.float64 or torch.float32.")
        for name in ("noise_std", "noise_mean"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise SchemeError(f"{name}={value!r}; needs a finite number.")
        if self.noise_std < 1:
            raise SchemeError(
                f"noise_std={self.noise_std:g}; noise smaller than the data hides nothing. Use at least 1."
            )
        if self.noise_std > _MOST_NOISE:
            raise SchemeError(
                f"noise_std={self.noise_std:g}; beyond {_MOST_NOISE:g} the generator's resolution, not the noise, "
                "decides what leaks. Lower the noise."
            )
        mantissa = 53 if self.dtype == torch.float64 else 24
        largest = abs(self.noise_mean) + 6 * self.noise_std
        if largest > 2.0 ** (mantissa - _CARRIED_BITS):
            remedy = "Lower the noise or use dtype=torch.float64." if mantissa == 24 else "Lower the noise."
            raise SchemeError(
                f"noise up to {largest:.3g} times the input is more than {self.dtype} can carry. {remedy}"
            )


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
