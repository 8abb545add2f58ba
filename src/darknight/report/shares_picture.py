"""The picture of what a worker sees: images, the shares that it received for them, the best it could make of those."""

from __future__ import annotations

from torch import Tensor

from darknight.report.image_rows import Row, image_rows


def shares_picture(originals: Tensor, received: Tensor, rebuilt: Tensor, *, worker: int, correlation: float) -> bytes:
    """A PNG with one column for each image.

    originals, rebuilt: (example, channel, height, width) on one scale of brightness. received: the shares, of any
    shape for one example and on any scale; one that is not an image is shown as a square.
    """
    span = float(originals.min()), float(originals.max())
    return image_rows(
        [
            Row(title="Original", subtitle="stays in the enclave", images=originals, span=span),
            Row(title=f"What worker {worker} received", subtitle="its share", images=received),
            Row(title="The best it can make of it", subtitle="linear decoder", images=rebuilt, span=span),
        ],
        heading=f"Correlation of what worker {worker} can rebuild with the originals: {correlation:z.2f}",
        subheading="Beyond the average image, on images the decoder was not shown; 1 is a perfect copy, 0 is nothing.",
        footnote="The decoder is a ridge regression that was told the true images behind half of this worker's shares. "
        "Where it learns nothing, the average image is its best guess.",
    )
