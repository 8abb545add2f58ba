"""The scheme: what is masked, against how many, in which arithmetic. An unsafe scheme does not construct."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace

import torch

from darknight.coding.systematic import field_systematic, real_systematic
from darknight.errors import SchemeError

PRIME_25 = 2**25 - 39
PRIME_28 = 2**28 - 57
# The second prime of each field, in which a wrap-around modulo the first one shows.
WITNESS = {PRIME_25: 2**25 - 49, PRIME_28: 2**28 - 89}

_BITS = {PRIME_25: range(4, 12), PRIME_28: range(4, 13)}
_MIXINGS = ("systematic", "dense")
_INTEGRITIES = ("freivalds", "parity", "both", "off")
# Noise beyond this many times the bound needs float64 workers; the paper's dense code in float32 is the exception.
_FLOAT32_NOISE = 2e3
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
        if not _is_int(self.bits) or self.bits not in allowed:
            raise SchemeError(f"bits={self.bits!r}; this prime carries {allowed.start} to {allowed.stop - 1} bits.")


@dataclass(frozen=True)
class Real:
    """The paper's arithmetic: floats with Gaussian noise of noise_std (and noise_mean) times the input's bound."""

    noise_std: float
    noise_mean: float = 0.0
    _: KW_ONLY
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
        mantissa = 53 if self.dtype == torch.float64 else 24
        largest = abs(self.noise_mean) + 6 * self.noise_std
        if largest > 2.0 ** (mantissa - _CARRIED_BITS):
            remedy = "Lower the noise or use dtype=torch.float64." if mantissa == 24 else "Lower the noise."
            raise SchemeError(
                f"noise up to {largest:.3g} times the input is more than {self.dtype} can carry. {remedy}"
            )


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one layer call is masked.

    inputs (K): private examples mixed in one virtual batch. colluders (M): workers that may pool all they see without
    learning anything. spares (E): extra workers. `training=False`, reached by `for_inference()`, needs no worker for
    gradients.

    Guarantees: construction succeeds only if every coalition of `colluders` workers meets an invertible noise block
        (Field: nothing leaks from shares; Real: a bound, see darknight.accounting).
    Assumes: workers of different operators; fresh noise for every masking; only verified results are decoded.
    Leaks: `caveats` says in words what this scheme does not protect.
    """

    inputs: int
    colluders: int
    spares: int = 0
    arithmetic: Field | Real = field(default_factory=Field)
    mask_gradients: bool = True
    mixing: str = "systematic"
    integrity: str = "freivalds"
    training: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        self._check_redundancy()
        if isinstance(self.arithmetic, Real):
            self._check_real(self.arithmetic)
        elif self.mixing == "systematic":
            field_systematic(
                self.inputs, self.colluders, self.spares, self.arithmetic.prime, self.sends_masked_gradients
            )

    @classmethod
    def paper(cls) -> Scheme:
        """The paper's own setting: dense code, float32, gradients in the clear, one redundant share."""
        return cls(
            inputs=2,
            colluders=1,
            spares=1,
            arithmetic=Real(noise_std=2e4, dtype=torch.float32),
            mask_gradients=False,
            mixing="dense",
            integrity="parity",
        )

    def for_inference(self) -> Scheme:
        """The same privacy for forward passes alone, with fewer workers."""
        return replace(self, training=False)

    @property
    def workers(self) -> int:
        """P: K + 2M + E with masked gradients, K + M + E without or for inference."""
        return self.base_workers + self.spares

    @property
    def base_workers(self) -> int:
        """The workers without the spares: those that make a weight gradient."""
        return self.inputs + (2 if self.sends_masked_gradients else 1) * self.colluders

    @property
    def sends_masked_gradients(self) -> bool:
        return self.training and self.mask_gradients

    @property
    def parity_rows(self) -> int:
        """How many answers more than needed a forward pass has."""
        return self.workers - self.inputs - self.colluders

    @property
    def caveats(self) -> tuple[str, ...]:
        """What this scheme does not protect, in words."""
        found = []
        if self.training and not self.mask_gradients:
            found.append(
                "gradients go to workers in the clear: the last layer's gradient shows the labels, and the zeros of "
                "the first layer's show its ReLU mask, from which an image can be rebuilt"
            )
        if isinstance(self.arithmetic, Real):
            found.append("real arithmetic leaks a bounded amount with every sending of an example; the bounds add up")
        if self.integrity == "off":
            found.append("answers are not checked: workers must be honest, for results and for privacy")
        if self.integrity == "parity":
            found.append("parity is blind when all workers are wrong together, and to more than M liars")
        if self.integrity in ("parity", "both") and (self.mixing != "dense" or isinstance(self.arithmetic, Real)):
            found.append("parity with public or real coefficients finds faults, not attackers")
        return tuple(found)

    # --- rules ------------------------------------------------------------------------------------------------------
    def _check_types(self) -> None:
        for name, least in (("inputs", 1), ("colluders", 1), ("spares", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise SchemeError(f"{name}={value!r}; needs a whole number of at least {least}.")
        if not isinstance(self.arithmetic, (Field, Real)):
            raise SchemeError(f"arithmetic={self.arithmetic!r}; use dk.Field() or dk.Real(noise_std).")
        if self.mixing not in _MIXINGS:
            raise SchemeError(f"mixing={self.mixing!r}; use one of {', '.join(_MIXINGS)}.")
        if self.integrity not in _INTEGRITIES:
            raise SchemeError(f"integrity={self.integrity!r}; use one of {', '.join(_INTEGRITIES)}.")
        for name in ("mask_gradients", "training"):
            if not isinstance(getattr(self, name), bool):
                raise SchemeError(f"{name}={getattr(self, name)!r}; use True or False.")

    def _check_redundancy(self) -> None:
        if self.integrity in ("parity", "both") and self.parity_rows == 0:
            raise SchemeError(
                f"integrity={self.integrity!r} compares redundant answers, and {self.workers} workers give none. "
                'Use spares=1 or more, or integrity="freivalds".'
            )

    def _check_real(self, real: Real) -> None:
        if real.dtype == torch.float32 and self.sends_masked_gradients:
            raise SchemeError(
                "masked gradients multiply two noisy values, which float32 cannot carry. "
                "Use Real(..., dtype=torch.float64) or dk.Field()."
            )
        if real.dtype == torch.float32 and real.noise_std >= _FLOAT32_NOISE and self.mixing != "dense":
            raise SchemeError(
                f"noise_std={real.noise_std:g} drowns a float32 result. Use dtype=torch.float64, a noise_std below "
                f'{_FLOAT32_NOISE:g}, or the paper\'s mixing="dense".'
            )
        if self.mixing == "dense":
            self._check_real_dense()
            amplification = math.sqrt(self.base_workers)
        else:
            code = real_systematic(self.inputs, self.colluders, self.spares, self.sends_masked_gradients)
            amplification = code.amplification
        if self.sends_masked_gradients:
            # Measured: the relative error of a weight gradient is about 20 times this product.
            magnitude = abs(real.noise_mean) + real.noise_std
            if 20 * amplification * magnitude**2 * 2.0**-53 > 2.0**-7:
                raise SchemeError(
                    f"noise of {magnitude:.3g} times the input, squared in the weight gradient, is more than float64 "
                    "can carry. Lower the noise or use dk.Field()."
                )

    def _check_real_dense(self) -> None:
        if self.colluders > 1:
            raise SchemeError(
                f'colluders={self.colluders} with mixing="dense": drawn real coefficients leak up to 2e5 times more '
                'to a coalition. Use mixing="systematic" or dk.Field().'
            )
        if self.sends_masked_gradients and self.base_workers % 2:
            raise SchemeError(
                f'inputs={self.inputs} with mixing="dense" and masked gradients: two flat noise columns need an even '
                'number of workers. Use an even number of inputs or mixing="systematic".'
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
