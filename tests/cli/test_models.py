"""darknight models: a table for people, JSON for scripts, one line for a mistake."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from cli.command import refused
from darknight.cli.app import run
from darknight.models import MODELS


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in [name for name in os.environ if name.startswith("DARKNIGHT_")]:
        monkeypatch.delenv(name)

    def command(*arguments):
        code = run(["models", *arguments])
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return command


def test_the_table_has_a_row_for_each_model(here):
    done = here()
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:6]] for row in rows}
    assert set(MODELS) <= set(cells)
    assert cells["vgg16"] == ["ImageNet", "138.36 M", "15.47 G", "16"]
    assert cells["resnet152"] == ["ImageNet", "60.19 M", "11.51 G", "156"]
    assert "images of 3x224x224, 1,000 classes" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_table_says_who_needs_larger_images_and_settings_come_from_the_file_too(here):
    Path("darknight.toml").write_text('[models]\nshape = "1X28X28"\nclasses = 1\n')
    lines = here().stdout.splitlines()
    assert lines[0].strip() == f"{len(MODELS)} models, images of 1x28x28, 1 class"
    rows = {line.split()[1]: line for line in lines if line.startswith("│")}
    assert "needs 32x32" in rows["vgg16"]
    assert "CIFAR" in rows["resnet18"]


def test_json_has_the_same_keys_for_all(here):
    done = here("--shape", "1x28x28", "--classes", "10", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert (found["shape"], found["classes"]) == ([1, 28, 28], 10)
    models = {model["name"]: model for model in found["models"]}
    assert list(models) == list(MODELS)
    assert len({tuple(model) for model in models.values()}) == 1
    none = dict.fromkeys(("form", "parameters", "macs", "bilinear_layers"))
    assert models["vgg16"] == {"name": "vgg16", **none, "smallest": 32, "note": "no batch norm"}
    parameters = (28 * 28 + 1) * 128 + 129 * 64 + 65 * 10
    assert (models["mlp"]["parameters"], models["mlp"]["bilinear_layers"]) == (parameters, 3)


def test_help_has_an_example_and_the_exit_codes(here):
    done = here("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "darknight models --shape 3x32x32 --classes 10" in done.stdout
    assert "0 done, 2 bad usage, 130 interrupted" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--shape 224", "--shape 224; needs channels x height x width, such as 3x224x224."),
        ("--shape 3x224x224x2", "--shape 3x224x224x2"),
        ("--shape 3x-1x8", "--shape 3x-1x8"),
        ("--shape 3x0x224", "shape 3x0x224"),
        ("--shape 3x224x65537", "from 1 to 65536"),
        ("--classes 0", "classes 0"),
        ("--classes many", "--classes"),
        ("vgg16", "vgg16"),
    ],
)
def test_mistakes_are_refused(here, arguments, complaint):
    assert complaint in refused(here(*arguments.split()), 2)
