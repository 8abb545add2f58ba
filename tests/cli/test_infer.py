"""darknight infer, for real: a trained model on masked shares."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from cli.command import darknight, refused, warm_darknight
from darknight.cli.app import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a small trained model, its test examples as an npz file, and some examples without labels."""
    folder = tmp_path_factory.mktemp("infer")
    rng = np.random.default_rng(0)
    y = np.arange(240) % 6
    x = rng.integers(0, 40, (240, 1, 8, 8)).astype(np.uint8)
    for index, label in enumerate(y):
        x[index, 0, label] += 150  # one bright row
    np.savez(folder / "set.npz", train_x=x[:200], train_y=y[:200], test_x=x[200:], test_y=y[200:])
    np.savez(folder / "new.npz", x=x[200:])
    done = warm_darknight(
        *("train", "--model", "mlp", "--data", "set.npz", "--epochs", "4", "--batch-size", "20", "--no-clear"),
        *("--no-picture", "--output", "run", "--json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)["private"]["best"]["accuracy"]


def test_a_labelled_set(trained):
    folder, accuracy = trained
    done = darknight(
        *("infer", "--checkpoint", "run", "--data", "set.npz", "--output", "found/here.csv", "--top", "2", "--json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["examples"] == summary["labelled"] == 40
    assert summary["accuracy"]["top_1"] == accuracy > 0.8
    assert summary["accuracy"]["top_1"] <= summary["accuracy"]["top_5"] <= 1
    assert summary["scheme"]["workers"] == len(summary["fleet"]["workers"]) == 5  # K + M, without those for gradients
    assert summary["examples_per_second"] == pytest.approx(40 / summary["seconds"])
    assert summary["integrity"]["failed"] == 0
    assert summary["leakage"]["nats_per_example"] == 0
    with (folder / "found" / "here.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["example", "label", "class_1", "probability_1", "class_2", "probability_2"]
    assert len(rows) == 40
    assert sum(row["label"] == row["class_1"] for row in rows) / 40 == accuracy
    assert all(1 >= float(row["probability_1"]) >= float(row["probability_2"]) >= 0 for row in rows)


def test_examples_without_labels_and_a_table_for_people(trained):
    folder, _ = trained
    done = warm_darknight(
        *("infer", "--checkpoint", "run/checkpoints/best.safetensors", "--data", "new.npz", "--output", "found.json"),
        *("--inputs", "2", "--batch-size", "16"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in ("K=2, M=1, 3 workers", "no labels", "examples a second", "checks passed", "found.json"):
        assert words in done.stdout, words
    assert "accuracy" not in done.stdout
    found = json.loads((folder / "found.json").read_text())
    assert len(found["predictions"]) == 40
    assert found["predictions"][0]["label"] is None
    assert len(found["predictions"][0]["classes"]) == 5
    assert found["summary"]["accuracy"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ("--checkpoint run", 2, "--data"),
        ("--checkpoint nowhere --data set.npz", 1, "nowhere: no checkpoint"),
        ("--checkpoint set.npz --data set.npz", 1, "set.npz: "),
        ("--checkpoint run --data nothing", 2, "unknown data 'nothing'"),
        ("--checkpoint run --data other.npz", 1, "other.npz"),
        ("--checkpoint run --data set.npz --output found.txt", 2, "ends in .csv or .json"),
        ("--checkpoint run --data set.npz --top 0", 2, "--top 0"),
        ("--checkpoint run --data set.npz --batch-size 0", 2, "--batch-size 0"),
        ("--checkpoint run --data set.npz --patience 0", 2, "--patience 0"),
        ("--checkpoint run --data set.npz --output set.npz/x.csv", 1, "cannot write"),
    ],
)
def test_what_is_refused(trained, monkeypatch, capsys, arguments, code, complaint):
    folder, _ = trained
    np.savez(folder / "other.npz", x=np.zeros((4, 3, 8, 8), np.uint8))
    monkeypatch.chdir(folder)
    before = sorted(Path().rglob("*"))
    assert run(["infer", *arguments.split()]) == code
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert sorted(Path().rglob("*")) == before


def test_damaged_weights_are_refused(trained, tmp_path):
    folder, _ = trained
    damaged = bytearray((folder / "run/checkpoints/best.safetensors").read_bytes())
    damaged[-5] ^= 1
    (tmp_path / "best.safetensors").write_bytes(damaged)
    line = refused(warm_darknight("infer", "--checkpoint", "best.safetensors", "--data", str(folder), cwd=tmp_path), 1)
    assert "best.safetensors: damaged" in line
