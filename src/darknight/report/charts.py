"""Charts for pages: curves with their intervals, and tables of numbers in colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from darknight.report.image_rows import INK, PALE, new_figure, png_of

# Told apart by people who do not see all colours, and by their marks where nobody does.
_COLOURS = ("#0b6e99", "#c2410c", "#6d28d9", "#15803d")
_MARKS = ("o", "s", "^", "D")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart: places, values, and the edges of their intervals."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def curves_chart(
    curves: Sequence[Curve], *, x_label: str, y_label: str, threshold: float | None = None, logarithmic: bool = False
) -> bytes:
    """A PNG of lines with shaded intervals; logarithmic: the horizontal axis, in powers of two."""
    figure = new_figure(7.5, 3.9, layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(curve.x, curve.y, color=colour, marker=mark, markersize=4, linewidth=1.6, label=curve.name)
    if threshold is not None:
        axes.axhline(threshold, color=PALE, linewidth=0.9, linestyle="--", label="threshold")
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({place for curve in curves for place in curve.x}), minor=False)
        axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.grid(color="#e6e6ee", linewidth=0.6)
    axes.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    return png_of(figure)


def matrix_chart(values: Sequence[Sequence[float | None]], *, labels: Sequence[str], legend: str) -> bytes:
    """A PNG of numbers from 0 to 1 in a square, the darker the larger; None is left empty."""
    size = len(labels)
    figure = new_figure(2.6 + 0.8 * size, 1.5 + 0.62 * size, layout="constrained")
    axes = figure.add_subplot()
    shown = [[float("nan") if value is None else value for value in row] for row in values]
    image = axes.imshow(shown, cmap="YlOrRd", vmin=0.0, vmax=1.0, aspect="auto")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value is not None:
                colour = "white" if value > 0.6 else INK
                axes.text(j, i, f"{value:z.2f}", ha="center", va="center", color=colour, fontsize=10)
    axes.set_xticks(range(size), labels, rotation=30, ha="right", fontsize=9, color=INK)
    axes.set_yticks(range(size), labels, fontsize=9, color=INK)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.set_label(legend, fontsize=9, color=INK)
    bar.outline.set_visible(False)
    return png_of(figure)
