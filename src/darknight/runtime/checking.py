"""Which check a pass gets, and what the ledger hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from darknight.accounting import Failed, Ledger, Unchecked, Verified
from darknight.coding import Scheme
from darknight.errors import IntegrityError
from darknight.runtime.layer import Layer
from darknight.types import Pass


@contextmanager
def checking(ledger: Ledger, layer: Layer, kind: Pass, check: str) -> Iterator[None]:
    """Writes down that the check inside passed, or that it failed; the error then names the layer."""
    try:
        yield
    except IntegrityError as error:
        ledger.record(Failed(layer=layer.label, kind=kind, check=check))
        raise IntegrityError(f"layer {layer.label}, {error}", kind=error.kind, check=error.check) from None
    ledger.record(Verified(layer=layer.label, kind=kind, check=check))


def freivalds_checks(scheme: Scheme, kind: Pass) -> bool:
    """Whether Freivalds checks this pass. Parity cannot check a weight gradient."""
    return scheme.integrity in ("freivalds", "both") or (scheme.integrity == "parity" and kind is Pass.GRAD_WEIGHT)


def note_unchecked(scheme: Scheme, ledger: Ledger, layer: Layer, *passes: Pass) -> None:
    """The ledger hears of results that nothing checked."""
    if scheme.integrity == "off":
        for kind in passes:
            ledger.record(Unchecked(layer=layer.label, kind=kind))
