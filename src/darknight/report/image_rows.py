"""Rows of small images, one column for each example: what went in, what a worker saw, what can be made of it.

Matplotlib is loaded when there is something to draw: every command of the command line loads this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE = "#1a1a2e", "#6b6b80"
_CELL = 1.05  # inches
_LABELS = 2.7  # inches, left of the images
_MARGIN = 0.15


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """images: (example, ...) of any shape; what is no image is shown as a square. span: darkest and brightest value;
    None for the row's own."""

    title: str
    subtitle: str
    images: Tensor
    span: tuple[float, float] | None = None


def image_rows(rows: list[Row], *, heading: str = "", subheading: str = "", footnote: str = "") -> bytes:
    """A PNG with one column for each image of the rows."""
    columns = max(len(row.images) for row in rows)
    above, below = (0.85 if heading else _MARGIN), (0.4 if footnote else _MARGIN)
    width, height = _LABELS + columns * _CELL + _MARGIN, len(rows) * _CELL + above + below
    figure = new_figure(width, height)
    grid = figure.add_gridspec(
        *(len(rows), columns),
        left=_LABELS / width,
        right=1 - _MARGIN / width,
        top=1 - above / height,
        bottom=below / height,
    )
    grid.update(wspace=0.08, hspace=0.12)
    for number, row in enumerate(rows):
        low, high = row.span or (float(row.images.min()), float(row.images.max()))
        for column, image in enumerate(row.images):
            axes = figure.add_subplot(grid[number, column])
            axes.imshow(_shown(image, low, high), cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
            _frame(axes)
            if column == 0:
                style: dict[str, Any] = {"ha": "right", "va": "center", "transform": axes.transAxes}
                axes.text(-0.12, 0.6, row.title, fontsize=13, color=INK, **style)
                axes.text(-0.12, 0.34, row.subtitle, fontsize=11, color=PALE, **style)
    left = _MARGIN / width
    figure.text(left, 1 - 0.32 / height, heading, fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(left, 1 - 0.62 / height, subheading, fontsize=9, color=PALE, va="center")
    figure.text(left, 0.18 / height, footnote, fontsize=8, color=PALE, va="center")
    return png_of(figure)


def new_figure(width: float, height: float, **settings: Any) -> Figure:
    """An empty one, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", **settings)
    FigureCanvasAgg(figure)
    return figure


def png_of(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _shown(image: Tensor, low: float, high: float) -> npt.NDArray[np.float64]:
    """Two dimensions to show, or three with colours, from 0 (the low value) to 1."""
    values = (image.detach().double().numpy() - low) / ((high - low) or 1.0)
    values = values.clip(0.0, 1.0)
    if values.ndim == 3 and values.shape[0] == 3:
        coloured: npt.NDArray[np.float64] = np.moveaxis(values, 0, -1)
        return coloured
    if values.ndim >= 2 and values.shape[-2] > 1:
        picture: npt.NDArray[np.float64] = values.reshape(-1, *values.shape[-2:])[0]
        return picture
    side = int(np.ceil(np.sqrt(values.size)))
    square = np.zeros(side * side)
    square[: values.size] = values.ravel()
    return square.reshape(side, side)


def _frame(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("#c8c8d4")
        spine.set_linewidth(0.6)
