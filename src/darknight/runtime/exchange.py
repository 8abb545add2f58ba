"""A pass over the workers: shares go out, enough answers come back (`runtime.sending`, `runtime.gathered`).

Guarantees: results do not depend on who failed (Field: bit for bit; contract tests: tests/runtime/test_faults.py).
Leaks: that a worker failed, and when; nothing about the data decides who takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from darknight.accounting import Ledger
from darknight.coding import Code, Field, Scheme
from darknight.fleet import Fleet
from darknight.ops import BilinearOp
from darknight.runtime.crew import Crew
from darknight.runtime.desk import Desk
from darknight.runtime.layer import Layer, Saved
from darknight.runtime.masking import Maker
from darknight.runtime.sending import BackwardRound, Deltas, ForwardRound
from darknight.types import Pass


class Exchange:
    """The passes. Who takes part depends on the scheme and on who failed, never on the data."""

    def __init__(self, scheme: Scheme, fleet: Fleet, ledger: Ledger) -> None:
        self.prime = scheme.arithmetic.prime if isinstance(scheme.arithmetic, Field) else None
        dtype = torch.int32 if isinstance(scheme.arithmetic, Field) else scheme.arithmetic.dtype
        self._crew = Crew(scheme, fleet, ledger, self.prime)
        self._desk = Desk(scheme, self._crew, ledger, self.prime, dtype)

    @property
    def seconds(self) -> tuple[float, float]:
        """Waited for workers, and computed by them, as they say."""
        return self._crew.waiting_seconds, self._crew.worker_seconds

    def open_call(self) -> int:
        """A number that was never used before: of a call, and of the masking of its input or gradient."""
        return self._desk.open_call()

    def forget_with(self, saved: Saved) -> None:
        """Workers forget the shares of the call when `saved` is gone."""
        nbytes = prod(self._desk.share_shape(saved.x_shape)) * self._desk.dtype.itemsize
        self._crew.forget_with(saved, saved.call, nbytes)

    def forget(self) -> None:
        """Tells workers which calls and weights are over."""
        self._crew.forget()

    # --- passes -----------------------------------------------------------------------------------------------------
    @contextmanager
    def forward(
        self, layer: Layer, op: BilinearOp, code: Code, maker: Maker, saved: Saved, keep: bool
    ) -> Iterator[ForwardRound]:
        """A pass that has begun. Its answers, by seat, are to be read while this is open; if it ends before somebody
        waited for them, they are not wanted any more. Notes in `saved` who keeps which share.
        """
        passing = ForwardRound(self._desk, layer, op, code, maker, saved, keep)
        try:
            with self._crew.asking():
                passing.begin()
                yield passing
        finally:
            passing.release()
            if not keep:
                self._crew.custody.forget(saved.call)

    @contextmanager
    def backward(
        self,
        layer: Layer,
        saved: Saved,
        code: Code,
        deltas: Deltas,
        passes: tuple[Pass, ...],
        again: Callable[[int], Tensor],
    ) -> Iterator[BackwardRound]:
        """The same for the backward passes of a call; arguments as `BackwardRound`."""
        masking = self.open_call()
        passing = BackwardRound(self._desk, layer, saved, code, deltas, passes, again, masking)
        try:
            with self._crew.asking():
                passing.begin()
                yield passing
        finally:
            passing.release()
            self._crew.custody.forget(masking)

    # --- liars ------------------------------------------------------------------------------------------------------
    def expel(self, worker: int, reason: str) -> None:
        """Puts the worker out."""
        self._crew.expel(worker, reason)

    def outside_field(self, layer: Layer, call: int, kind: Pass, by: Mapping[int, int]) -> None:
        """Puts out the workers, by seat, whose answers had values outside the field."""
        self._crew.outside_field(layer, call, kind, by)

    def copy_answers(self) -> None:
        """From now on no answer is read where its worker can write."""
        self._desk.in_place = False

    def is_out(self, worker: int) -> bool:
        return self._crew.is_out(worker)

    def name(self, worker: int) -> str:
        return self._crew.name(worker)
