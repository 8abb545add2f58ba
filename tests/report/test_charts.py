"""Charts and rows of images are PNGs that show what they are given."""

import struct

import pytest
import torch

from darknight.report import Curve, Row, curves_chart, image_rows, matrix_chart


def size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_curves():
    flat = Curve(name="flat", x=[1, 2, 4], y=[0, 0, 0], low=[-0.1] * 3, high=[0.1] * 3)
    steep = Curve(name="steep", x=[1, 2, 4], y=[0, 0.5, 1], low=[0, 0.4, 0.9], high=[0.1, 0.6, 1])
    labels = {"x_label": "epochs", "y_label": "correlation"}
    one, two, marked = (
        curves_chart([flat], **labels),
        curves_chart([flat, steep], **labels, logarithmic=True),
        curves_chart([flat, steep], **labels, logarithmic=True, threshold=0.2),
    )
    assert size(one) == size(two) == size(marked)
    assert len({one, two, marked}) == 3


def test_a_matrix_with_holes():
    values = [[0.1, None], [0.9, 0.2]]
    assert size(matrix_chart(values, labels=["a", "b"], legend="x")) < size(
        matrix_chart([[0.1] * 4] * 4, labels=list("abcd"), legend="x")
    )


@pytest.mark.parametrize("shape", [(1, 8, 9), (3, 8, 9), (1, 1, 7), (50,), (2, 8, 9)])
def test_rows_of_anything(shape):
    rows = [Row(title="a", subtitle="b", images=torch.rand(3, *shape))] * 2
    bare, headed = image_rows(rows), image_rows(rows, heading="h", subheading="s", footnote="f")
    assert size(bare)[0] == size(headed)[0]
    assert size(bare)[1] < size(headed)[1]


def test_a_span_is_shared_brightness():
    """The same images on another scale look different; a constant row is no error."""
    images = torch.rand(2, 1, 8, 9)
    narrow, wide = (image_rows([Row(title="", subtitle="", images=images, span=(0, top))]) for top in (1, 5))
    assert narrow != wide
    assert size(image_rows([Row(title="", subtitle="", images=torch.zeros(2, 1, 8, 9))])) == size(wide)
