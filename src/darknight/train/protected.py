"""A model that is protected for as long as a block lasts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import nn

from darknight.nn import STRUCTURE, protect_at, unprotect_
from darknight.runtime import Runtime

log = logging.getLogger("darknight")


@contextmanager
def protected(
    model: nn.Module, runtime: Runtime, *, place: str = STRUCTURE, batch: tuple[int, ...] = ()
) -> Iterator[list[dict[str, Any]]]:
    """Gives the rows of the report, as plain values; they are complete only at the end.

    place: where products are computed (nn.protect_at), by cost for batches of the shape `batch`.
    """
    report = protect_at(place, model, runtime, batch)
    rows: list[dict[str, Any]] = []
    try:
        yield rows
    finally:
        unprotect_(model)
    rows += [asdict(row) for row in report.rows]
    log.info("layers\n%s", report)
