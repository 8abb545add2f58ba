"""Normalisation: measured in one pass, exactly, and on the training part alone."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from darknight.data import IMAGENET, Normalisation
from darknight.data import normalise as module
from darknight.data.normalise import measured
from darknight.data.source import InMemory
from darknight.errors import DataError


def everything(source):
    return torch.arange(len(source))


@pytest.mark.parametrize("batch_bytes", [1, 1000, 1 << 22])
def test_bytes_give_the_exact_mean_and_deviation(monkeypatch, batch_bytes):
    monkeypatch.setattr(module, "_BATCH_BYTES", batch_bytes)
    pixels = np.random.default_rng(0).integers(0, 256, (37, 3, 5, 7), dtype=np.uint8)
    pixels[:, 1] //= 9
    found = measured(InMemory("here", pixels), everything(pixels))
    assert np.allclose(found.mean, (pixels / 255).mean(axis=(0, 2, 3)), rtol=1e-14)
    assert np.allclose(found.std, (pixels / 255).std(axis=(0, 2, 3)), rtol=1e-13)


def test_columns_far_from_zero_keep_their_deviation():
    """Sums of squares lose it: 1e9 squared has no room for a deviation of 1."""
    values = np.random.default_rng(0).normal((1e9, -1e9, 3), (1.0, 0.1, 1e6), (5000, 3))
    found = measured(InMemory("here", values), everything(values))
    assert np.allclose(found.std, values.std(axis=0), rtol=1e-6)
    x = found(torch.from_numpy(values))
    assert x.dtype == torch.float32
    assert x.std(dim=0, correction=0).sub(1).abs().max() < 1e-4
    assert x.mean(dim=0).abs().max() < 1e-4


def test_only_the_chosen_examples_count():
    values = np.array([[1.0], [3.0], [1000.0]])
    assert measured(InMemory("here", values), torch.tensor([1, 0])) == Normalisation((2.0,), (1.0,))


@pytest.mark.parametrize("value", [0.0, 0.1, 7.0, 1e150])
def test_a_constant_column_becomes_zero(value):
    values = np.full((1000, 1), value)
    found = measured(InMemory("here", values), everything(values))
    assert found.std == (1.0,)
    assert found(torch.from_numpy(values)).abs().max() <= abs(value) * 1e-13


def test_the_number_of_threads_changes_no_bit():
    values = np.random.default_rng(0).normal(size=(3000, 11)).astype(np.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(measured(InMemory("here", values), everything(values)))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_the_raw_examples_are_left_alone():
    for raw in (torch.ones(2, 1), torch.ones(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.uint8)):
        Normalisation((0.25,), (0.5,))(raw)
        assert (raw == 1).all()


def test_it_survives_json():
    assert Normalisation(**json.loads(json.dumps(asdict(IMAGENET)))) == IMAGENET


@pytest.mark.parametrize(
    ("mean", "std"), [((), ()), ((1.0,), (1.0, 2.0)), ((1.0,), (0.0,)), ((1.0,), (-1.0,)), ((float("nan"),), (1.0,))]
)
def test_nonsense_is_refused(mean, std):
    with pytest.raises(DataError):
        Normalisation(mean, std)


def test_another_number_of_channels_is_refused():
    with pytest.raises(DataError, match="3 channels"):
        IMAGENET(torch.zeros(2, 1, 8, 8))


@pytest.mark.parametrize(("value", "complaint"), [(np.nan, "here, example 2"), (1e200, "no deviation")])
def test_values_that_cannot_be_normalised_are_refused(value, complaint):
    values = np.ones((4, 2))
    values[2, 1] = value
    with pytest.raises(DataError, match=complaint):
        measured(InMemory("here", values), everything(values))
