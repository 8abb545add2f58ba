"""One scheme that might do: its numbers, before anybody knows whether it constructs."""

from __future__ import annotations

from dataclasses import dataclass

from darknight.coding import Code, Field, Real, Scheme, group_count
from darknight.coding.systematic import field_systematic, real_systematic
from darknight.ops.cost import Sharing

_FIELD = Field()
_INT32, _FLOAT64 = 4, 8


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """K, M, E and an arithmetic: the default field, or float64, which is the only float that carries masked gradients.

    Real schemes with float32 and gradients in the clear are no candidates: what they leak has no bound.
    """

    inputs: int
    colluders: int
    spares: int
    exact: bool
    training: bool
    integrity: str = "freivalds"

    @property
    def base_workers(self) -> int:
        """Those that make a weight gradient."""
        return self.inputs + (2 if self.training else 1) * self.colluders

    @property
    def workers(self) -> int:
        return self.base_workers + self.spares

    @property
    def computing(self) -> int:
        """Those that compute in a forward pass, and as many for an input gradient; the others only keep a share."""
        return self.workers if self.parity else self.inputs + self.colluders + self.spares

    @property
    def parity(self) -> bool:
        """Whether answers are compared with each other: then all of them are wanted."""
        return self.integrity in ("parity", "both")

    @property
    def freivalds(self) -> bool:
        """Whether forward passes and input gradients are checked by products; weight gradients always are."""
        return self.integrity in ("freivalds", "both")

    @property
    def seeded(self) -> int:
        """Those whose share of a masking is a noise row, and goes out as a seed."""
        return self.colluders if self.exact else 0

    @property
    def width(self) -> int:
        """Bytes of a number on the wire."""
        return _INT32 if self.exact else _FLOAT64

    @property
    def prime(self) -> int | None:
        return _FIELD.prime if self.exact else None

    @property
    def largest_weight(self) -> float:
        """Of quantised weights; floats need no such bound."""
        return 2.0**_FIELD.bits if self.exact else 0.0

    @property
    def sharing(self) -> Sharing:
        """What decides what sending costs."""
        return Sharing(
            inputs=self.inputs,
            colluders=self.colluders,
            workers=self.workers,
            computing=self.computing,
            answering=self.base_workers,
            training=self.training,
            width=self.width,
            checked=self.freivalds,
            gradients_checked=self.integrity != "off",
            seeded=self.seeded,
        )

    def groups(self, batch_size: int) -> int:
        return group_count(batch_size, self.inputs)

    def code(self) -> Code:
        """Its coefficients; raises SchemeError where there are none."""
        if self.exact:
            return field_systematic(self.inputs, self.colluders, self.spares, _FIELD.prime, self.training)
        return real_systematic(self.inputs, self.colluders, self.spares, self.training)

    def scheme(self, noise_std: float | None = None) -> Scheme:
        """The scheme itself; raises SchemeError if it is unsafe or impossible."""
        arithmetic = _FIELD if noise_std is None else Real(noise_std=noise_std)
        return Scheme(
            inputs=self.inputs,
            colluders=self.colluders,
            spares=self.spares,
            arithmetic=arithmetic,
            training=self.training,
            integrity=self.integrity,
        )
