"""Coefficients for two and three colluders over the reals, found offline by scripts/search_real_coefficients.py.

Drawn coefficients would leak hundreds to hundreds of thousands of times more to some coalition, so what is not in the
table is refused. The entries are verified again whenever a code is built from them.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from darknight.coding.algebra import IntMatrix
from darknight.errors import SchemeError


class RealEntry(NamedTuple):
    """Integer blocks of the systematic code; `units` scale the noise of A and of B."""

    a: IntMatrix
    b: IntMatrix
    C: IntMatrix
    spares_of_inputs: IntMatrix
    spares_of_gradients: IntMatrix
    units: tuple[float, float]


def real_entry(inputs: int, colluders: int, spares: int) -> RealEntry:
    table = _table()
    try:
        return table[inputs, colluders, spares]
    except KeyError:
        known = sorted((K, E) for K, M, E in table if colluders == M)
        offer = f"known (inputs, spares) are {known}" if known else "known are 1 to 3 colluders"
        raise SchemeError(
            f"no verified real coefficients for inputs={inputs}, colluders={colluders}, spares={spares}; {offer}. "
            "Use one of these, or dk.Field(), which has no such limit."
        ) from None


@cache
def _table() -> dict[tuple[int, int, int], RealEntry]:
    raw = json.loads(files("darknight.coding").joinpath("real_coefficients.json").read_text())
    return {
        (entry["inputs"], entry["colluders"], entry["spares"]): RealEntry(
            _matrix(entry["a"]),
            _matrix(entry["b"]),
            _matrix(entry["C"]),
            _matrix(entry["spare_A"]),
            _matrix(entry["spare_B"]),
            (entry["scale_A"], entry["scale_B"]),
        )
        for entry in raw["entries"]
    }


def _matrix(rows: list[list[int]]) -> IntMatrix:
    return tuple(tuple(row) for row in rows)
