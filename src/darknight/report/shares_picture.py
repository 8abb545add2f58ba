"""The picture of what a worker sees: images, the shares that it received for them, the best it could make of those."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

_INK, _PALE = "#1a1a2e", "#6b6b80"
_CELL = 1.05  # inches
_LABELS = 2.1  # inches, left of the images


def shares_picture(originals: Tensor, received: Tensor, rebuilt: Tensor, *, worker: int, correlation: float) -> bytes:
    """A PNG with one column for each image.

    originals, rebuilt: (example, channel, height, width) on one scale of brightness. received: the shares, of any
    shape for one example and on any scale; one that is not an image is shown as a square.
    """
    columns = len(originals)
    low, high = float(originals.min()), float(originals.max())
    rows: list[tuple[str, str, list[npt.NDArray[np.float64]], tuple[float, float]]] = [
        ("Original", "stays in the enclave", [_flat(image) for image in originals], (low, high)),
        (f"What worker {worker} received", "its share", [_flat(share) for share in received], _range(received)),
        ("The best it can make of it", "linear decoder", [_flat(image) for image in rebuilt], (low, high)),
    ]
    width, height = _LABELS + columns * _CELL + 0.15, 3 * _CELL + 1.25
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        *(3, columns), left=_LABELS / width, right=1 - 0.15 / width, top=1 - 0.85 / height, bottom=0.4 / height
    )
    grid.update(wspace=0.08, hspace=0.12)
    for row, (title, subtitle, images, (darkest, brightest)) in enumerate(rows):
        for column, image in enumerate(images):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(image, cmap="gray", vmin=darkest, vmax=brightest, interpolation="nearest")
            _frame(axes)
            if column == 0:
                style: dict[str, Any] = {"ha": "right", "va": "center", "transform": axes.transAxes}
                axes.text(-0.12, 0.58, title, fontsize=10, color=_INK, **style)
                axes.text(-0.12, 0.38, subtitle, fontsize=8, color=_PALE, **style)
    figure.text(
        *(0.15 / width, 1 - 0.32 / height),
        f"Correlation of what worker {worker} can rebuild with the originals: {correlation:z.2f}",
        fontsize=13,
        fontweight="bold",
        color=_INK,
        va="center",
    )
    figure.text(
        *(0.15 / width, 1 - 0.62 / height),
        "Beyond the average image, on images the decoder was not shown; 1 is a perfect copy, 0 is nothing.",
        fontsize=9,
        color=_PALE,
        va="center",
    )
    figure.text(
        *(0.15 / width, 0.18 / height),
        "The decoder is a ridge regression that was told the true images behind half of this worker's shares. "
        "Where it learns nothing, the average image is its best guess.",
        fontsize=8,
        color=_PALE,
        va="center",
    )
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _range(values: Tensor) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _flat(image: Tensor) -> npt.NDArray[np.float64]:
    """Two dimensions to show: the first channel of an image, or the features of a vector as a square."""
    values = image.detach().double().numpy()
    if values.ndim >= 2:
        picture: npt.NDArray[np.float64] = values.reshape(-1, *values.shape[-2:])[0]
        return picture
    side = int(np.ceil(np.sqrt(values.size)))
    square = np.full(side * side, values.min())
    square[: values.size] = values.ravel()
    return square.reshape(side, side)


def _frame(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("#c8c8d4")
        spine.set_linewidth(0.6)
