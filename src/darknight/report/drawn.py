"""A figure with its words: what it is called, where its numbers come from, and what to see in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING, Any

from darknight.report.image_rows import INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = "#e6e6ee"
# Told apart by people who do not see all colours, and by their marks where nobody does.
COLOURS = ("#1a1a2e", "#0b6e99", "#15803d", "#ca8a04", "#c2410c", "#6d28d9")
MARKS = ("x", "o", "D", "v", "s", "^")
_DOTS = 110  # an inch: sharp on a page, and small enough to keep with the text
_TONES = 192
QUOTED = "#9a9ab0"  # with stripes: never the colour of something that was measured


@dataclass(frozen=True, eq=False, kw_only=True)
class Drawn:
    """name: of the PNG, without its ending. caption: ends with what to see."""

    name: str
    title: str
    caption: str
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        """Drawn once: a layout that is drawn again moves by a pixel. In few colours, which halves the file."""
        from PIL import Image

        drawn, small = BytesIO(), BytesIO()
        self.figure.savefig(drawn, format="png", dpi=_DOTS, metadata={"Software": None})
        with Image.open(drawn) as picture:
            picture.convert("RGB").quantize(_TONES).save(small, format="png", optimize=True)
        return small.getvalue()


def panels(columns: int, rows: int = 1, *, width: float = 10.0, height: float = 3.6, **shared: Any) -> tuple[Any, Any]:
    """A figure and its axes, as (row, column). shared: sharex and sharey of matplotlib."""
    figure = new_figure(width, height, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def dressed(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Labels with their units, a pale grid, no frame above and at the right."""
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend_above(figure: Figure, axes: Axes, *, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=9, labelcolor=INK)


def whole_numbers(axes: Axes, values: Sequence[int]) -> None:
    """Ticks where something was measured."""
    axes.set_xticks(sorted(set(values)))
    axes.xaxis.set_major_formatter("{x:.0f}")
