"""Which check a pass gets, and what the ledger hears of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from darknight.accounting import Failed, Ledger, Unchecked, Verified
from darknight.coding import Scheme
from darknight.errors import IntegrityError
from darknight.runtime.layer import Layer
from darknight.types import Pass


def checking(ledger: Ledger, layer: Layer, kind: Pass, check: str) -> AbstractContextManager[None]:
    """Writes down that the check inside passed, or that it failed; the error then names the layer."""
    return _Checking(ledger, layer, kind, check)


class _Checking:
    """A context, of which every pass has one."""

    __slots__ = ("_check", "_kind", "_layer", "_ledger")

    def __init__(self, ledger: Ledger, layer: Layer, kind: Pass, check: str) -> None:
        self._ledger, self._layer, self._kind, self._check = ledger, layer, kind, check

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        label = self._layer.label
        if error is None:
            self._ledger.record(Verified(layer=label, kind=self._kind, check=self._check))
        elif isinstance(error, IntegrityError):
            self._ledger.record(Failed(layer=label, kind=self._kind, check=self._check))
            raise IntegrityError(f"layer {label}, {error}", kind=error.kind, check=error.check) from None


def freivalds_checks(scheme: Scheme, kind: Pass) -> bool:
    """Whether Freivalds checks this pass. Parity cannot check a weight gradient."""
    return scheme.integrity in ("freivalds", "both") or (scheme.integrity == "parity" and kind is Pass.GRAD_WEIGHT)


def note_unchecked(scheme: Scheme, ledger: Ledger, layer: Layer, *passes: Pass) -> None:
    """The ledger hears of results that nothing checked."""
    if scheme.integrity == "off":
        for kind in passes:
            ledger.record(Unchecked(layer=layer.label, kind=kind))
