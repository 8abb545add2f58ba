"""What is protected and what is not, layer by layer, with what each did so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MASKED = "masked"
ENCLAVE = "enclave"


@dataclass
class Row:
    """One layer, or one function that the model called.

    where: "masked" or "enclave". flops: multiplications and additions of its products in forward passes so far,
    evaluation included; None for what cannot be counted. whole: its products are listed here and not as functions.
    """

    name: str
    kind: str
    where: str
    why: str
    calls: int = 0
    flops: int | None = 0
    whole: bool = False


class Report:
    """The rows of one protected model. Calls and flops grow with use; functions appear when they are first called.

    caution: what a reader must know before anything else.
    """

    def __init__(self, rows: Iterable[Row] = (), *, caution: str = "") -> None:
        self.caution = caution
        self._rows: dict[tuple[str, str, str], Row] = {}
        for row in rows:
            self._rows[row.name, row.kind, row.where] = row

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(self._rows.values())

    @property
    def masked(self) -> tuple[Row, ...]:
        """What workers compute, on masked shares."""
        return tuple(row for row in self.rows if row.where == MASKED)

    @property
    def enclave(self) -> tuple[Row, ...]:
        """What stays in the enclave, and why."""
        return tuple(row for row in self.rows if row.where == ENCLAVE)

    def count(self, name: str, kind: str, where: str, why: str, flops: int) -> None:
        """A product was computed: in the layer that is `name`, or by the function `kind` that it called."""
        wholes = (row for row in self._rows.values() if row.whole and (row.name, row.where) == (name, where))
        row = next(wholes, None) or self._rows.setdefault((name, kind, where), Row(name, kind, where, why))
        row.calls += 1
        row.flops = (row.flops or 0) + flops

    def move(self, name: str, kind: str, where: str, why: str) -> None:
        """A layer's place was changed, by a state that was loaded. What it did so far stays in its row."""
        for row in self.rows:
            if (row.name, row.kind) == (name, kind):
                row.where, row.why, row.whole = where, why, where == ENCLAVE
        self._rows = {(row.name, row.kind, row.where): row for row in self.rows}

    def __str__(self) -> str:
        header = ("layer", "kind", "where", "calls", "Mflop", "why")
        lines = [(row.name or "(model)", row.kind, row.where, *_did(row), row.why) for row in self.rows]
        widths = [max(len(line[i]) for line in (header, *lines)) for i in range(5)]
        table = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[5]]).rstrip()
            for line in (header, *lines)
        ]
        masked, enclave = (sum(row.flops or 0 for row in rows) for rows in (self.masked, self.enclave))
        unseen = sum(row.flops is None for row in self.rows)
        if masked + enclave:
            share = f"{masked / (masked + enclave):.1%} of the forward products so far were computed on masked shares"
            table.append(share + (f"; {unseen} scripted modules are not counted" if unseen else ""))
        if not self.masked:
            table.append("nothing of this model is masked so far: workers get no part of it")
        return "\n".join([self.caution, *table] if self.caution else table)


def _did(row: Row) -> tuple[str, str]:
    """Calls and Mflop, of products: a layer that has none, or whose functions have rows of their own, shows a dash."""
    if row.flops is None:
        return f"{row.calls}", "?"
    if row.where == ENCLAVE and not row.whole and not row.calls:
        return "-", "-"
    return f"{row.calls}", f"{row.flops / 1e6:.1f}"
