"""Augmentation: each operation by what it may and must do, determinism, and that threads change nothing."""

import numpy as np
import pytest
import torch

from darknight.data import Augmentation
from darknight.errors import UsageError

NOTHING = {"crop_padding": 0, "flip": False}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def batch():
    """Images whose every pixel is different, and none is zero."""
    return torch.arange(1.0, 1 + 40 * 3 * 8 * 10).reshape(40, 3, 8, 10)


def test_nothing_is_nothing(batch):
    out = Augmentation(**NOTHING)(batch, generator())
    assert torch.equal(out, batch)
    assert out.data_ptr() != batch.data_ptr()


def test_a_crop_is_a_window_of_the_padded_image_the_same_for_all_channels(batch):
    out = Augmentation(crop_padding=2, flip=False)(batch, generator())
    padded = torch.nn.functional.pad(batch, [2] * 4)
    windows = set()
    for image, found in zip(padded, out, strict=True):
        fits = [
            (down, right)
            for down in range(5)
            for right in range(5)
            if torch.equal(image[:, down : down + 8, right : right + 10], found)
        ]
        assert len(fits) == 1
        windows |= set(fits)
    assert {down for down, _ in windows} == {right for _, right in windows} == set(range(5))


def test_a_flip_mirrors_about_half_of_the_images_whole(batch):
    many = batch.repeat(25, 1, 1, 1)
    out = Augmentation(crop_padding=0)(many, generator())
    kept = (out == many).flatten(1).all(dim=1)
    mirrored = (out == many.flip(3)).flatten(1).all(dim=1)
    assert (kept ^ mirrored).all()
    assert 420 < int(mirrored.sum()) < 580  # 1,000 coins, five deviations


def test_a_hole_is_a_square_of_zeros_even_partly_outside(batch):
    out = Augmentation(cutout=4, **NOTHING)(batch, generator())
    areas = set()
    for image, found in zip(batch, out, strict=True):
        hole = found[0] == 0
        rows, columns = hole.any(dim=1), hole.any(dim=0)
        assert torch.equal(hole, rows[:, None] & columns[None])
        assert torch.equal(found, image.masked_fill(hole, 0))
        assert 2 <= int(rows.sum()) <= 4
        assert 2 <= int(columns.sum()) <= 4
        for line in (rows, columns):
            assert (line.int().diff().abs().sum()) <= 2  # one piece
        areas.add(int(hole.sum()))
    assert 16 in areas
    assert len(areas) > 1


def test_a_resized_crop_of_a_ramp_is_a_ramp():
    """Where a pixel's value is its place, the result says which box was cut out."""
    height, width = 48, 64
    rows = torch.arange(height, dtype=torch.float32).view(1, 1, height, 1).expand(500, 1, height, width)
    columns = torch.arange(width, dtype=torch.float32).view(1, 1, 1, width).expand(500, 1, height, width)
    out = Augmentation(crop_padding=0, flip=False, resized_crop=(0.2, 0.7))(torch.cat([rows, columns], 1), generator())
    y, x = out[:, 0, :, width // 2], out[:, 1, height // 2]
    # Away from the borders, neighbours are box / length apart.
    box_height = (y[:, height // 2] - y[:, height // 2 - 1]) * height
    box_width = (x[:, width // 2] - x[:, width // 2 - 1]) * width
    share = box_height * box_width / (height * width)
    assert 0.17 < share.min() < 0.25
    assert 0.6 < share.max() < 0.75
    ratio = box_width / box_height
    assert ratio.min() > 0.7
    assert ratio.max() < 1.4
    assert (ratio < 0.85).any()
    assert (ratio > 1.18).any()
    for ends, length in ((y, height), (x, width)):
        assert ends.min() >= 0
        assert ends.max() <= length - 1
        assert (ends[:, 0] < 1).any()
        assert (ends[:, -1] > length - 1.2).any()
        assert (ends.diff(dim=1) >= 0).all()


def test_a_resized_crop_of_everything_is_the_image():
    x = torch.rand(3, 3, 16, 16, generator=generator(1))
    out = Augmentation(crop_padding=0, flip=False, resized_crop=(1.0, 1.0))(x, generator())
    assert torch.allclose(out, x, atol=1e-4)  # of ten boxes of this area only a square would fit


@pytest.mark.parametrize(
    "augment",
    [Augmentation(), Augmentation(cutout=8), Augmentation.imagenet(), Augmentation(flip=False, crop_padding=1)],
)
def test_the_generator_decides_and_threads_do_not(augment):
    x = torch.rand(64, 3, 48, 40, generator=generator(1))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            draws = generator(7)
            results.append((augment(x, draws), draws.get_state()))
    finally:
        torch.set_num_threads(before)
    for out, state in results[1:]:
        assert np.array_equal(out.numpy().view(np.int32), results[0][0].numpy().view(np.int32))
        assert torch.equal(state, results[0][1])
    assert not torch.equal(results[0][0], augment(x, generator(8)))


def test_the_draws_do_not_depend_on_the_images(batch):
    """A training that goes on from a checkpoint has the generator, not the images of before."""
    augment = Augmentation(cutout=3)
    states = []
    for images in (batch, torch.zeros(40, 1, 20, 30)):
        draws = generator()
        augment(images, draws)
        states.append(draws.get_state())
    assert torch.equal(*states)


def test_shapes_and_layouts_are_kept():
    x = torch.rand(4, 3, 32, 32).to(memory_format=torch.channels_last)
    for augment in (Augmentation(cutout=4), Augmentation.imagenet()):
        assert torch.equal(augment(x, generator()), augment(x.contiguous(), generator()))
    assert Augmentation()(torch.zeros(0, 3, 32, 32), generator()).shape == (0, 3, 32, 32)
    assert Augmentation.imagenet()(torch.zeros(0, 3, 32, 32), generator()).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(
    "settings",
    [{"crop_padding": -1}, {"cutout": -1}, {"resized_crop": (0.0, 1.0), "crop_padding": 0},
     {"resized_crop": (0.5, 0.4), "crop_padding": 0}, {"resized_crop": (0.5, 1.1), "crop_padding": 0},
     {"resized_crop": (0.5, 1.0)}],
)  # fmt: skip
def test_nonsense_is_refused(settings):
    with pytest.raises(UsageError):
        Augmentation(**settings)


@pytest.mark.parametrize("x", [torch.zeros(4, 7), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)])
def test_what_is_no_batch_of_images_is_refused(x):
    with pytest.raises(UsageError, match="images are floats"):
        Augmentation()(x, generator())
