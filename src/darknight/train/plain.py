"""Values that JSON has words for."""

from __future__ import annotations

import math
from typing import Any


def plain(value: Any) -> Any:
    """The same with null for numbers that JSON has no word for: a leakage without a bound is infinite."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
