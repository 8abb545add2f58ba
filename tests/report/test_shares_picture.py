"""The picture is a PNG of the right size, whatever the shares look like."""

import struct
import subprocess
import sys

import pytest
import torch

from darknight.report import shares_picture


def size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "received",
    [
        torch.randint(2**28, (8, 1, 8, 8), dtype=torch.int32),
        images(8, 1, 8, 8) * 1e6,
        images(8, 50),
        torch.zeros(8, 3, 8, 8),
    ],
    ids=["residues", "floats", "vectors", "constant"],
)
def test_shares_of_any_kind_are_shown(received):
    png = shares_picture(images(8, 1, 8, 8), received, images(8, 1, 8, 8), worker=0, correlation=-0.001)
    width, height = size(png)
    assert 1200 < width < 2000
    assert 400 < height < 900


def test_width_follows_the_number_of_images():
    widths = [
        size(shares_picture(*(images(n, 3, 9, 8) for _ in range(3)), worker=2, correlation=0.5))[0] for n in (2, 8)
    ]
    assert widths[0] < widths[1]


def test_no_global_state_of_matplotlib_is_touched():
    script = "import sys, darknight.report; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
