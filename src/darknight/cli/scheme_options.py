"""From the flags about masking to a scheme."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from darknight.coding import Field, Real, Scheme
from darknight.errors import UsageError

PLACE_HELP = (
    "structure: depthwise convolutions stay in the enclave. cost: each layer goes where it is cheaper, measured here. "
    "workers: all are masked."
)


class Arithmetic(StrEnum):
    """What --arithmetic accepts."""

    FIELD = "field"
    REAL = "real"
    PAPER = "paper"


@dataclass(frozen=True, kw_only=True)
class SchemeOptions:
    """The flags, None where one was not given."""

    arithmetic: Arithmetic = Arithmetic.FIELD
    inputs: int | None = None
    colluders: int | None = None
    spares: int | None = None
    noise_std: float | None = None
    mixing: str | None = None
    integrity: str | None = None

    def scheme(self) -> Scheme:
        """The scheme they ask for; flags that contradict each other are refused."""
        if self.arithmetic is Arithmetic.PAPER:
            return self._paper()
        if self.arithmetic is Arithmetic.FIELD and self.noise_std is not None:
            raise UsageError("--noise-std is for --arithmetic real; noise in the field is always uniform. Drop it.")
        if self.arithmetic is Arithmetic.REAL and self.noise_std is None:
            raise UsageError("--arithmetic real needs --noise-std, in times the largest input. Try --noise-std 1000.")
        return Scheme(
            inputs=4 if self.inputs is None else self.inputs,
            colluders=1 if self.colluders is None else self.colluders,
            spares=0 if self.spares is None else self.spares,
            arithmetic=Field() if self.noise_std is None else Real(noise_std=self.noise_std),
            mixing=self.mixing or "systematic",
            integrity=self.integrity or "freivalds",
        )

    def _paper(self) -> Scheme:
        given = [
            f"--{name.replace('_', '-')}"
            for name in ("inputs", "colluders", "spares", "noise_std", "mixing", "integrity")
            if getattr(self, name) is not None
        ]
        if given:
            raise UsageError(f"--arithmetic paper is one published setting and takes no {', '.join(given)}. Drop that.")
        return Scheme.paper()


def scheme_words(scheme: Scheme) -> dict[str, object]:
    """The scheme as plain values for a JSON object."""
    arithmetic: dict[str, object] = (
        {"name": "field", "prime": scheme.arithmetic.prime, "bits": scheme.arithmetic.bits}
        if isinstance(scheme.arithmetic, Field)
        else {
            "name": "real",
            "noise_std": scheme.arithmetic.noise_std,
            "noise_mean": scheme.arithmetic.noise_mean,
            "dtype": str(scheme.arithmetic.dtype).removeprefix("torch."),
        }
    )
    return {
        "inputs": scheme.inputs,
        "colluders": scheme.colluders,
        "spares": scheme.spares,
        "workers": scheme.workers,
        "arithmetic": arithmetic,
        "mask_gradients": scheme.mask_gradients,
        "mixing": scheme.mixing,
        "integrity": scheme.integrity,
    }
