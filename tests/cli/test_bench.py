"""darknight bench: JSON for scripts, tables for people, one line for a mistake."""

import json
import os
import subprocess

import pytest

from cli.command import refused
from darknight.bench import Ceiling, Passes
from darknight.cli import bench as command_file
from darknight.cli.app import run
from darknight.cli.bench import summary
from darknight.ops.cost import Rates

FEW = ("--model", "small-cnn", "--size", "16", "--batch", "3", "--times", "1")


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("darknight.bench.ceiling.keep_memory", lambda: True)  # it lasts as long as this process
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in [name for name in os.environ if name.startswith("DARKNIGHT_")]:
        monkeypatch.delenv(name)

    def command(*arguments):
        code = run(["bench", *arguments])
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return command


def test_json_has_the_ratio_and_what_it_is_made_of(here):
    done = here(*FEW, "--pass", "both", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind in ("train", "infer"):
        parts = found["breakdown"]["shm"][kind]["small_cnn"]
        assert found["ceiling"]["shm"][kind]["small_cnn"] == parts["plain"]["seconds"] / parts["enclave"]["seconds"]
        assert (parts["batch"], parts["size"], parts["times"]) == (3, 16, 1)
        assert parts["enclave"]["phases"]["encode"] > 0
        assert parts["enclave"]["layers"]
    assert found["kernels"]["encode_over_copy"] > 0
    assert found["kernels"]["decode_over_copy"] > 0


def test_a_place_by_cost_is_measured_and_said(here, monkeypatch):
    rates = Rates(**{**dict.fromkeys(Rates.__dataclass_fields__, 0.0), "call": 1.0})
    monkeypatch.setattr("darknight.nn.places.measured_rates", lambda: rates)
    done = here(*FEW, "--pass", "infer", "--place", "cost", "--json")
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)["breakdown"]["shm"]["infer"]["small_cnn"]
    assert (parts["place"], parts["masked_layers"], parts["enclave"]["layers"]) == ("cost", 0, {})
    assert "use one of structure, cost, workers" in refused(here(*FEW, "--place", "cloud"), 2)


def test_the_tables_are_for_people(here):
    done = here(*FEW, "--pass", "infer", "--layers")
    assert done.returncode == 0, done.stderr
    assert "small-cnn, inference, batch 3 at 16x16: ceiling" in done.stdout
    assert "encode" in done.stdout
    assert "by layer" in done.stdout
    assert "4 layers masked (by structure)" in done.stdout
    assert "of a copy of the same bytes" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_papers_models_and_batches_are_the_default(here, monkeypatch):
    asked = []

    def measure(name, **settings):
        asked.append((name, settings["training"], settings["batch"], settings["size"]))
        return ceiling(name, settings["training"])

    monkeypatch.setattr(command_file, "measure_ceiling", measure)
    assert here("--json").returncode == 0
    assert asked == [
        ("vgg16", True, 8, 224),
        ("resnet152", True, 8, 224),
        ("mobilenet-v2", True, 16, 224),
        ("vgg16", False, 8, 224),
        ("mobilenet-v1", False, 16, 224),
    ]


def ceiling(name: str, training: bool) -> Ceiling:
    return Ceiling(
        model=name, batch=2, size=32, training=training, times=5, plain=6.0, layout="usual", enclave=2.0, wall=9.0
    )


def test_names_in_json_are_those_of_torchvision():
    passes = Passes(nbytes=1, times=5, encode_over_copy=2.0, decode_over_copy=3.0, noise_over_encode=0.1)
    found = summary([ceiling("mobilenet-v2", True), ceiling("vgg16", True), ceiling("vgg16", False)], passes)
    assert found["kernels"] == {"encode_over_copy": 2.0, "decode_over_copy": 3.0}
    assert found["ceiling"] == {"shm": {"train": {"mobilenet_v2": 3.0, "vgg16": 3.0}, "infer": {"vgg16": 3.0}}}


def test_mistakes_are_one_line(here):
    assert "needs train, infer or both" in refused(here("--pass", "learn"), 2)
    assert "unknown model" in refused(here("--model", "vgg17"), 2)
