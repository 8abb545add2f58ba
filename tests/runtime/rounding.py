"""How far an honest result in real arithmetic is off: what the checks themselves derive, call by call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from darknight.coding import decoder
from darknight.integrity import parity
from darknight.integrity import real as checks
from darknight.types import Pass


@contextmanager
def spreads_of_checks() -> Iterator[dict[Pass, float]]:
    """By pass, the largest standard deviation of an honest error, over all checks that are made meanwhile."""
    seen: dict[Pass, float] = {}

    def note(kind: Pass, spread: float) -> None:
        seen[kind] = max(spread, seen.get(kind, 0.0))

    with pytest.MonkeyPatch.context() as patch:
        for kind in Pass:
            verify = getattr(checks, f"verified_{kind.value}")

            def weighed(op, result, *rest, spread, kind=kind, verify=verify):
                note(kind, spread)
                return verify(op, result, *rest, spread=spread)

            patch.setattr(checks, f"verified_{kind.value}", weighed)
        compare = parity.verified_real_answers

        def compared(mixing, replies, kind, *, spread):
            # As integrity.real.decoded_spread, but for what float64 leaves of the noise: far below float32's rounding.
            workers, matrix = decoder(mixing, None, replies)
            rows = [[float(v) * spread[worker] for v, worker in zip(row, workers, strict=True)] for row in matrix]
            note(kind, max(math.hypot(*row) for row in rows))
            return compare(mixing, replies, kind, spread=spread)

        patch.setattr(parity, "verified_real_answers", compared)
        yield seen
