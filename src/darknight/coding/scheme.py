"""The scheme: what is masked, against how many, in which arithmetic. An unsafe scheme does not construct."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from darknight.coding.arithmetic import Field, Real, is_whole
from darknight.coding.dense import flat_code
from darknight.coding.real import gradient_error
from darknight.coding.systematic import field_systematic, real_systematic, refuse_if_endless, worst_condition
from darknight.errors import SchemeError

_MIXINGS = ("systematic", "dense")
_INTEGRITIES = ("freivalds", "parity", "both", "off")
# Noise beyond this many times the bound needs float64 workers; the paper's dense code in float32 is the exception.
_FLOAT32_NOISE = 2e3
_WORST_GRADIENT_ERROR = 2.0**-6
_WORST_ANSWER_ERROR = 2.0**-5


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one layer call is masked.

    inputs (K): private examples mixed in one virtual batch. colluders (M): workers that may pool all they see without
    learning anything. spares (E): extra workers. `training=False`, reached by `for_inference()`, needs no worker for
    gradients.

    Guarantees: construction succeeds only if every coalition of `colluders` workers meets an invertible noise block
        (Field: nothing leaks from shares; Real: a bound, see darknight.accounting). Contract tests:
        tests/coding/test_scheme.py, tests/coding/test_code.py.
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
        if self.mixing == "dense":
            refuse_if_endless(self.inputs, self.colluders, self.spares, self.sends_masked_gradients)
        if isinstance(self.arithmetic, Real):
            self._check_real(self.arithmetic)
        elif self.mixing == "systematic":
            field_systematic(
                self.inputs, self.colluders, self.spares, self.arithmetic.prime, self.sends_masked_gradients
            )

    @classmethod
    def paper(cls) -> Scheme:
        """The paper's own setting: dense code, float32, gradients in the clear, one redundant share.

        Its check is parity, which does not cover workers that are all wrong together (the same wrong weights) or more
        than M liars, and with real coefficients finds faults, not attackers. `caveats` says so wherever it is used.
        """
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

    @cached_property
    def workers(self) -> int:
        """P: K + 2M + E with masked gradients, K + M + E without or for inference."""
        return self.base_workers + self.spares

    @cached_property
    def base_workers(self) -> int:
        """The workers without the spares: those that make a weight gradient."""
        return self.inputs + (2 if self.sends_masked_gradients else 1) * self.colluders

    @property
    def seats(self) -> tuple[str, ...]:
        """What each worker holds, in words and in order."""
        K, M, E = self.inputs, self.colluders, self.spares
        if self.mixing == "dense":
            return tuple(f"mixture {j}" for j in range(self.workers))
        carriers = ("s", "r") if self.sends_masked_gradients else ("r",)
        noise = [f"carrier of {which}" + (f" {m}" if M > 1 else "") for which in carriers for m in range(M)]
        return (*(f"data {j}" for j in range(K)), *noise, *(f"spare {e}" for e in range(E)))

    @cached_property
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
            if self.integrity != "off":
                found.append(
                    "errors of the size of rounding pass the checks of real arithmetic, and a single wrong element may "
                    "be larger by the root of how many are summed with it; SECURITY.md has both sizes"
                )
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
            if not is_whole(value) or value < least:
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
        noise = real.noise_std + abs(real.noise_mean)
        if real.dtype == torch.float32 and noise >= _FLOAT32_NOISE and self.mixing != "dense":
            raise SchemeError(
                f"noise of {noise:g} times the input drowns a float32 result. Use dtype=torch.float64, noise below "
                f'{_FLOAT32_NOISE:g}, or the paper\'s mixing="dense".'
            )
        if self.mixing == "dense":
            self._check_real_dense()
            code = flat_code(self.inputs, self.base_workers, self.sends_masked_gradients)
        else:
            code = real_systematic(self.inputs, self.colluders, self.spares, self.sends_masked_gradients)
            if real.dtype == torch.float32 and worst_condition(code.A) * noise * 2.0**-24 > _WORST_ANSWER_ERROR:
                raise SchemeError(
                    f"with spares={self.spares} and a worker missing, noise of {noise:g} times the input leaves too "
                    "few bits of a float32 result. Use dtype=torch.float64, less noise, or fewer spares."
                )
        if code.masks_gradients and gradient_error(code, real) > _WORST_GRADIENT_ERROR:
            raise SchemeError(
                f"noise_std={real.noise_std:g} enters a weight gradient squared, and with inputs={self.inputs}, "
                f"colluders={self.colluders}, spares={self.spares} that is more than float64 can carry. "
                "Lower the noise, inputs or colluders, or use dk.Field()."
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
