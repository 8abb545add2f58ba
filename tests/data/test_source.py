"""Sources: examples by number, out of memory, out of files, and out of several of these."""

import numpy as np
import pytest
import torch

from darknight.data.files import StillFile
from darknight.data.source import InMemory, Joined, Records
from darknight.errors import DataError

PIXELS = np.arange(9 * 2 * 3, dtype=np.uint8).reshape(9, 2, 3)


@pytest.fixture(params=["memory", "records", "joined"])
def source(request, tmp_path):
    if request.param == "memory":
        return InMemory("here", PIXELS)
    if request.param == "joined":
        parts = [(0, 3), (3, 4), (4, 9)]  # of different sizes
        return Joined([InMemory(f"part {begin}", PIXELS[begin:end]) for begin, end in parts])
    content = b"head" + b"".join(b"label" + image.tobytes() for image in PIXELS) + b"tail"
    (tmp_path / "file").write_bytes(content)
    return Records(StillFile(tmp_path / "file"), 9, (2, 3), begin=4, skip=5)


@pytest.mark.parametrize("numbers", [[], [0], [8], [3, 4, 5], [8, 0, 3, 4, 3, 2, 1, 7, 8], list(range(9))])
def test_examples_come_in_the_order_asked_for(source, numbers):
    found = source.read(torch.tensor(numbers, dtype=torch.int64))
    assert torch.equal(found, torch.from_numpy(PIXELS[numbers][:, None]))
    assert (source.shape, len(source)) == ((1, 2, 3), 9)


def test_places_are_for_people(source):
    assert source.place(4).endswith(", example 0" if isinstance(source, Joined) else ", example 4")


def test_channels_behind_come_in_front(tmp_path):
    pixels = np.arange(2 * 4 * 5 * 3, dtype=">u2").reshape(2, 4, 5, 3)
    (tmp_path / "file").write_bytes(pixels.tobytes())
    stored = Records(StillFile(tmp_path / "file"), 2, (4, 5, 3), dtype=pixels.dtype, channels_last=True)
    for source in (stored, InMemory("here", pixels, channels_last=True)):
        assert source.shape == (3, 4, 5)
        found = source.read(torch.tensor([1, 0]))
        assert found.is_contiguous()
        assert np.array_equal(found.numpy(), pixels[::-1].transpose(0, 3, 1, 2))


def test_a_file_that_ends_too_early_is_named(tmp_path):
    (tmp_path / "file").write_bytes(bytes(20))
    with pytest.raises(DataError, match="file: ends too early"):
        Records(StillFile(tmp_path / "file"), 9, (2, 3)).read(torch.tensor([2, 3]))
