"""darknight bench: JSON for scripts, tables for people, a history that shows a regression, one line for a mistake."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cli.command import refused
from darknight.bench import Bandwidth, Ceiling, Memory, Passes, Peak
from darknight.cli import bench as command_file
from darknight.cli.app import run
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


def test_json_has_every_ratio_and_what_it_is_made_of(here):
    done = here(*FEW, "--json", "--history", "bench.jsonl")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for links in ("shm", "sealed"):
        for kind in ("train", "infer"):
            parts = found["breakdown"][links][kind]["small_cnn"]
            assert found["ceiling"][links][kind]["small_cnn"] == parts["plain"]["seconds"] / parts["enclave"]["seconds"]
            assert (parts["batch"], parts["size"], parts["times"]) == (3, 16, 1)
            assert parts["enclave"]["phases"]["encode"] > 0
            assert all("encode" in phases for phases in parts["enclave"]["layers"].values())
            limits = found["roofline"][links][kind]["small_cnn"]
            assert 0 < limits["ceiling_at_the_limit_of_memory"] < limits["ceiling_if_passes_were_joined"]
            assert limits["phases"]["encode"]["measured_over_least"] > 0
    train = found["breakdown"]["shm"]["train"]["small_cnn"]
    assert found["overhead"]["field"]["small_cnn"] == train["wall_over_plain"]
    assert found["overhead"]["paper"]["small_cnn"] > 0
    assert found["memory"]["small_cnn"] > 0
    assert found["kernels"]["encode_over_copy"] > 0
    assert found["kernels"]["decode_over_copy"] > 0
    assert found["rival"]["crypten"] is None
    assert "--rivals" in found["rival"]["absent"]
    assert found["history"].keys() == json.loads(Path("bench.jsonl").read_text())["ratios"].keys()
    assert not any(each["regressed"] for each in found["history"].values())


def test_a_place_by_cost_is_measured_and_said(here, monkeypatch):
    rates = Rates(**{**dict.fromkeys(Rates.__dataclass_fields__, 0.0), "call": 1.0})
    monkeypatch.setattr("darknight.nn.places.measured_rates", lambda: rates)
    done = here(*FEW, "--what", "ceiling", "--links", "shm", "--pass", "infer", "--place", "cost", "--json")
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)["breakdown"]["shm"]["infer"]["small_cnn"]
    assert (parts["place"], parts["masked_layers"], parts["enclave"]["layers"]) == ("cost", 0, {})
    assert "use one of structure, cost, workers" in refused(here(*FEW, "--place", "cloud"), 2)


def test_the_tables_are_for_people(here):
    done = here(*FEW, "--pass", "infer", "--links", "shm", "--what", "ceiling", "--what", "kernels", "--layers")
    assert done.returncode == 0, done.stderr
    assert "small-cnn, inference, shm, batch 3 at 16x16: ceiling" in done.stdout
    assert "encode" in done.stdout
    assert "by layer" in done.stdout
    assert "at that limit" in done.stdout
    assert "of a copy of the same bytes" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


# --- what is chosen ---------------------------------------------------------------------------------------------------
FOUND = Ceiling(
    model="", batch=2, size=32, training=True, times=5, plain=6.0, layout="usual", enclave=2.0, wall=9.0, processors=9.0
)
PEAKS = {"plain": Peak(before=1, peak=3, shared=0), "protected": Peak(before=1, peak=4, shared=0)}


@pytest.fixture
def asked(monkeypatch):
    """What would be measured; `slower` slows the enclave down."""

    class Asked(list):
        slower = 1.0

    calls = Asked()

    def ceiling(name, **given):
        scheme = "paper" if given["scheme"].inputs == 2 else "field"
        kind = "train" if given["training"] else "infer"
        calls.append((kind, name, given["links"], scheme, given["batch"], given["size"]))
        parts = {each: given[each] for each in ("training", "links", "batch", "size")}
        return replace(FOUND, model=name, enclave=2.0 * calls.slower, **parts)

    def memory(name, *, batch, size):
        calls.append(("memory", name, batch, size))
        return Memory(model=name, batch=batch, size=size, **PEAKS)

    def passes(nbytes, *, times):
        calls.append(("kernels", nbytes))
        return Passes(nbytes=nbytes, times=times, encode_over_copy=2.0, decode_over_copy=3.0, noise_over_encode=0.1)

    monkeypatch.setattr(command_file, "measure_ceiling", ceiling)
    monkeypatch.setattr(command_file, "measure_memory", memory)
    monkeypatch.setattr(command_file, "measure_passes", passes)
    monkeypatch.setattr(
        command_file, "measure_bandwidth", lambda times: Bandwidth(copy=2e9, in_place=3e9, read=4e9, seal=1e9)
    )
    return calls


def test_the_papers_models_and_batches_are_the_default(here, asked):
    done = here("--json")
    assert done.returncode == 0, done.stderr
    trained = [("vgg16", 8), ("resnet152", 8), ("mobilenet-v2", 16)]
    assert asked == [
        *(("train", name, links, "field", batch, 224) for name, batch in trained for links in ("shm", "sealed")),
        *(
            ("infer", name, links, "field", batch, 224)
            for name, batch in (("vgg16", 8), ("mobilenet-v1", 16))
            for links in ("shm", "sealed")
        ),
        *(("train", name, "shm", "paper", batch, 224) for name, batch in trained),
        *(("memory", name, batch, 224) for name, batch in trained),
        ("kernels", 64 << 20),
    ]
    found = json.loads(done.stdout)
    assert found["ceiling"]["sealed"] == {
        "train": {"vgg16": 3.0, "resnet152": 3.0, "mobilenet_v2": 3.0},
        "infer": {"vgg16": 3.0, "mobilenet_v1": 3.0},
    }
    assert found["overhead"].keys() == {"field", "paper"}
    assert found["memory"] == {"vgg16": 1.5, "resnet152": 1.5, "mobilenet_v2": 1.5}


def test_quick_is_small_and_can_be_changed(here, asked):
    assert here("--quick").returncode == 0
    assert {call[1] for call in asked if call[0] != "kernels"} == {"resnet-small"}
    assert {call[-2:] for call in asked if call[0] != "kernels"} == {(4, 32)}
    assert ("kernels", 4 << 20) in asked
    asked.clear()
    assert here("--quick", "--model", "mlp", "--size", "8", "--what", "memory").returncode == 0
    assert asked == [("memory", "mlp", 4, 8)]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--what", "kernels"), [("kernels", 64 << 20)]),
        (("--what", "overhead", "--pass", "infer"), []),
        (
            ("--what", "overhead", "--model", "resnet18"),
            [("train", "resnet18", "shm", scheme, 16, 224) for scheme in ("field", "paper")],
        ),
        (
            ("--what", "ceiling", "--pass", "infer", "--links", "sealed", "--model", "vgg16"),
            [("infer", "vgg16", "sealed", "field", 8, 224)],
        ),
    ],
)
def test_a_part_can_be_chosen(here, asked, arguments, wanted):
    assert here(*arguments).returncode == 0
    assert asked == wanted


# --- the history ------------------------------------------------------------------------------------------------------
KEPT = ("--what", "ceiling", "--model", "vgg16", "--pass", "train", "--links", "shm", "--history", "bench.jsonl")


def test_a_slower_enclave_is_marked_and_fails_where_it_is_asked_to(here, asked):
    assert "worse" not in here(*KEPT, "--fail-on-regression").stdout
    asked.slower = 1.05
    done = here(*KEPT, "--fail-on-regression")
    assert (done.returncode, "worse" in done.stdout) == (0, False)
    asked.slower = 1.5
    done = here(*KEPT)
    assert (done.returncode, "worse by 30%" in done.stdout) == (0, True)
    assert "ceiling.shm.train.vgg16" in done.stdout
    asked.slower = 2.0
    done = here(*KEPT, "--fail-on-regression", "--json")
    assert done.returncode == 1
    change = json.loads(done.stdout)["history"]["ceiling.shm.train.vgg16"]
    assert change == {"now": 1.5, "last": 2.0, "best": 3.0, "regressed": True}
    assert len(Path("bench.jsonl").read_text().splitlines()) == 4


def test_other_sizes_are_no_regression(here, asked):
    assert here(*KEPT).returncode == 0
    asked.slower = 9.0
    assert here(*KEPT, "--batch", "3", "--fail-on-regression").returncode == 0
    assert here(*KEPT, "--fail-on-regression").returncode == 1


# --- mistakes ---------------------------------------------------------------------------------------------------------
def test_mistakes_are_one_line(here):
    assert "needs train, infer or both" in refused(here("--pass", "learn"), 2)
    assert "needs shm, sealed or both" in refused(here("--links", "pigeon"), 2)
    assert "needs ceiling, overhead, kernels, memory or rivals" in refused(here("--what", "everything"), 2)
    assert "unknown model" in refused(here("--model", "vgg17"), 2)
    assert "Add --history FILE" in refused(here("--fail-on-regression"), 2)


def test_a_history_that_cannot_be_written(here, asked, tmp_path):
    done = here("--what", "kernels", "--history", str(tmp_path))
    assert done.returncode == 1
    assert "Choose another --history" in done.stderr
