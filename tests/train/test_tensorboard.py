"""Curves for TensorBoard."""

import sys

import pytest

from darknight.errors import DarKnightError, UsageError
from darknight.train import TensorBoard, fit
from train.test_loop import model_for, recipe, toy

pytestmark = pytest.mark.usefixtures("one_thread")


def curves(folder):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_curves_of_steps_and_epochs(tmp_path):
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path / "curves") as board:
        history = fit(model_for(toy()), toy(), recipe(schedule="cosine"), progress=[board])
    found = curves(tmp_path / "curves")
    assert found.keys() == {
        *("step/loss", "step/learning_rate", "step/seconds", "epoch/loss", "epoch/accuracy", "epoch/seconds")
    }
    assert [step for step, _ in found["step/loss"]] == list(range(1, 9))
    assert found["step/learning_rate"][0][1] == pytest.approx(0.05)
    assert found["epoch/accuracy"] == [
        (4, pytest.approx(history.epochs[0].accuracy)),
        (8, pytest.approx(history.epochs[1].accuracy)),
    ]


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'darknight\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    pytest.importorskip("tensorboard")
    with pytest.raises(DarKnightError, match="cannot write to"):
        TensorBoard(tmp_path / "file" / "below")
