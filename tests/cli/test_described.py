"""A model from a file, for real: trained, stopped, resumed without the file, and used."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cli.command import refused, warm_darknight
from darknight.cli.app import run
from darknight.cli.description_file import read_description

NET = """
[[layers]]
type = "Conv2d"
in_channels = 1
out_channels = 6
kernel_size = 3
padding = 1

[[layers]]
type = "Residual"
layers = [
  { type = "ReLU" },
  { type = "Conv2d", in_channels = 6, out_channels = 6, kernel_size = [3, 1], padding = "same" },
]

[[layers]]
type = "MaxPool2d"
kernel_size = 2

[[layers]]
type = "Flatten"

[[layers]]
type = "Linear"
in_features = 96
out_features = 10
"""
QUICK = ("train", "--model", "net.toml", "--batch-size", "256", "--no-clear", "--no-picture", "--output", "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described")
    (folder / "net.toml").write_text(NET)
    done = warm_darknight(*QUICK, "--epochs", "1", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_it_is_trained_on_shares(trained):
    folder, summary = trained
    assert summary["settings"]["model"] == "net.toml"
    masked = [layer["name"] for layer in summary["private"]["layers"] if layer["where"] == "masked"]
    assert masked == ["0", "1.layers.1", "4"]
    weights = load_file(folder / "run" / "checkpoints" / "best.safetensors")
    assert sorted(weights) == [f"{place}.{what}" for place in ("0", "1.layers.1", "4") for what in ("bias", "weight")]


def test_it_goes_on_and_is_used_without_the_file(trained):
    folder, _ = trained
    (folder / "net.toml").unlink()
    done = warm_darknight("train", "--resume", "--epochs", "3", "--output", "run", "--no-picture", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["private"]["best"]["accuracy"]
    done = warm_darknight("infer", "--checkpoint", "run", "--data", "digits", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["examples"]) == ("net.toml", 1797)  # the training part too
    assert found["accuracy"]["top_1"] == pytest.approx(best, abs=0.1)
    assert best > 0.5


def test_toml_and_json_say_the_same(tmp_path):
    (tmp_path / "net.toml").write_text(NET)
    found = read_description(str(tmp_path / "net.toml"))
    (tmp_path / "net.JSON").write_text(json.dumps(found))
    assert read_description(str(tmp_path / "net.JSON")) == found
    assert read_description("small-cnn") is None


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("gone.toml", None, "--model gone.toml: cannot be read (No such file or directory)."),
        ("bad.toml", "layers = [", "--model bad.toml: not a TOML file"),
        ("bad.json", "[" * 100_000, "--model bad.json: not a JSON file"),
        ("bad.json", b"\xff", "--model bad.json: not a JSON file"),
        ("bad.json", "[]", "--model bad.json: not an object with a list of layers"),
        ("large.json", " " * (2 << 20), "--model large.json: larger than 1048576 bytes"),
        ("other.json", '{"layers": [{"type": "Upsample"}]}', "layer 0: type 'Upsample'; needs a type, one of Conv1d"),
        ("classes.toml", NET.replace("= 10\n", "= 9\n"), "the layers make (2, 9) of 2 examples of (1, 8, 8)"),
    ],
)
def test_mistakes_are_refused(tmp_path, monkeypatch, capsys, name, text, complaint):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert run(["train", "--model", name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert complaint in said.err
    assert len(said.err.splitlines()) == 1
    assert not Path("darknight-train").exists()


def test_a_description_of_a_checkpoint_that_was_changed_is_refused(trained, tmp_path):
    """The digest does not fit any more; nothing of the file is believed."""
    folder, _ = trained
    best = (folder / "run" / "checkpoints" / "best.safetensors").read_bytes()
    changed = best.replace(b"MaxPool2d", b"AvgPool2d")
    assert changed != best
    (tmp_path / "best.safetensors").write_bytes(changed)
    done = warm_darknight("infer", "--checkpoint", "best.safetensors", "--data", "digits", cwd=tmp_path)
    assert "damaged" in refused(done, 1)
