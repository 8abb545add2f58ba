"""A model that is protected for as long as a block lasts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import nn

from darknight.nn import protect_, unprotect_
from darknight.runtime import Runtime

log = logging.getLogger("darknight")


@contextmanager
def protected(model: nn.Module, runtime: Runtime) -> Iterator[list[dict[str, Any]]]:
    """Gives the rows of the report, as plain values; they are complete only at the end."""
    report = protect_(model, runtime)
    rows: list[dict[str, Any]] = []
    try:
        yield rows
    finally:
        unprotect_(model)
    rows += [asdict(row) for row in report.rows]
    log.info("layers\n%s", report)
