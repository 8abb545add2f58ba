"""Accuracy by epoch: a run that is killed goes on, and what is missing is said."""

import json
import signal
import time

import pytest
import torch

from darknight.data import Dataset, Tensors
from darknight.errors import DataError, UsageError
from darknight.models import build_model
from darknight.report.experiment_file import read_experiment
from darknight.report.results_folder import figures_of
from experiments.scripts import run_here, script, start

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = ("--quick", "--model", "vgg-small", "--setting", "clear", "--setting", "field", "--save-every", "0")


def numbers(path):
    """Everything but how long it took and the line that started it."""
    words = json.loads(path.read_text())
    for cell in words["cells"].values():
        del cell["seconds"]
    del words["command"]
    return words


def test_a_run_that_is_killed_goes_on_and_ends_with_the_same_file(tmp_path, monkeypatch):
    """Killed in the middle of the second cell, with a checkpoint of it on the disk."""
    killed, whole = tmp_path / "killed.json", tmp_path / "whole.json"
    process = start("accuracy", "--out", killed, *EXACT)
    checkpoints, deadline = tmp_path / "killed.json.work" / "vgg-small field", time.monotonic() + 240
    while not list(checkpoints.glob("step-0000000[2-5]*")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(read_experiment(killed).cells) == ["vgg-small/clear"]
    before = killed.read_bytes()
    run_here("accuracy", monkeypatch, "--out", killed, *EXACT)
    run_here("accuracy", monkeypatch, "--out", whole, *EXACT)
    assert numbers(killed) == numbers(whole)
    assert killed.read_bytes() != before
    assert not any((tmp_path / "killed.json.work").iterdir())
    # Complete, it is left as it is.
    before = killed.read_bytes()
    run_here("accuracy", monkeypatch, "--out", killed, *EXACT)
    assert killed.read_bytes() == before
    made = read_experiment(killed)
    assert not made.missing
    assert made.cells["vgg-small/clear"]["epochs"] != made.cells["vgg-small/field"]["epochs"]
    assert len(figures_of({"accuracy": made})["accuracy"]) == 1


def test_without_the_images_it_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("DARKNIGHT_SHARED", raising=False)
    with pytest.raises(DataError, match=r"DARKNIGHT_SHARED must name a folder that holds data/cifar10_small\.npz"):
        run_here("accuracy", monkeypatch, "--out", tmp_path / "a.json")
    monkeypatch.setenv("DARKNIGHT_SHARED", str(tmp_path))
    with pytest.raises(DataError, match="use --quick"):
        run_here("accuracy", monkeypatch, "--out", tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_another_scale_is_not_mixed_in(tmp_path, monkeypatch):
    quick = ("--quick", "--model", "vgg-small", "--setting", "clear")
    run_here("accuracy", monkeypatch, "--out", tmp_path / "a.json", *quick)
    before = (tmp_path / "a.json").read_bytes()
    with pytest.raises(UsageError, match="another experiment or scale"):
        run_here("accuracy", monkeypatch, "--out", tmp_path / "a.json", *quick, "--seed", "1")
    with pytest.raises(UsageError, match="unknown setting"):
        run_here("accuracy", monkeypatch, "--out", tmp_path / "a.json", "--quick", "--setting", "N(1, 1)")
    assert (tmp_path / "a.json").read_bytes() == before
    (tmp_path / "a.json").write_bytes(before[: len(before) // 2])
    with pytest.raises(DataError, match="not JSON"):
        run_here("accuracy", monkeypatch, "--out", tmp_path / "a.json", *quick)


def test_networks_are_as_small_as_is_said(monkeypatch):
    accuracy, settings = script("accuracy", monkeypatch), script("settings", monkeypatch)
    images, labels = torch.zeros(2, 3, 32, 32), torch.tensor([0, 9])
    data = Dataset(name="zeros", train=Tensors(images, labels), test=Tensors(images, labels), classes=10)
    for model in settings.MODELS:
        network = build_model(model, shape=data.shape, classes=10, seed=0)
        assert 1e6 < accuracy.multiplications(network, data) < 40e6
        assert network.training


def test_the_noise_settings_are_the_papers(monkeypatch):
    settings = script("settings", monkeypatch)
    for name, noise in {**settings.TRAINING, **settings.TABLE_2}.items():
        if noise is None:
            assert name in ("clear", "field")
            continue
        mean, variance = (float(part) for part in name.removeprefix("N(").removesuffix(")").split(","))
        scheme = noise.scheme()
        assert (noise.mean, noise.variance) == (mean, variance)
        assert scheme.arithmetic.noise_std**2 == pytest.approx(variance)
        assert (scheme.inputs, scheme.workers, scheme.mask_gradients, scheme.mixing) == (2, 3, False, "dense")


@pytest.mark.full
def test_noise_with_workers(tmp_path, monkeypatch):
    run_here("accuracy", monkeypatch, "--out", tmp_path / "a.json", "--quick")
    made = read_experiment(tmp_path / "a.json")
    assert not made.missing
    assert all(len(cell["epochs"]) == 2 for cell in made.cells.values())
