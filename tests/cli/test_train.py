"""darknight train, for real: private training beside a clear one, with what it writes and prints."""

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import warm
from cli.command import clean_environment, darknight, refused, warm_darknight
from darknight.cli.app import run

QUICK = ("train", "--model", "mlp", "--epochs", "1", "--batch-size", "256")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "darknight.toml").write_text("[train]\nlearning-rate = 0.2\nseed = 3\n")
    done = darknight(*QUICK, "--json", "--output", "run", cwd=folder, DARKNIGHT_TRAIN_SEED="5")
    return folder, done


def test_json_is_all_that_is_printed(finished):
    _, done = finished
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["settings"]["learning_rate"] == 0.2  # the file
    assert summary["settings"]["seed"] == 5  # the variable, over the file
    assert summary["settings"]["model"] == "mlp"  # a flag
    scheme = summary["settings"]["scheme"]
    assert (scheme["inputs"], scheme["colluders"], scheme["workers"]) == (4, 1, 6)
    assert summary["examples"] == {"train": 1437, "test": 360}


def test_the_private_training_learns_what_the_clear_one_learns(finished):
    summary = json.loads(finished[1].stdout)
    assert summary["clear"]["accuracy"] > 0.6
    assert abs(summary["clear"]["accuracy"] - summary["private"]["accuracy"]) < 0.1
    assert summary["private"]["loss"] == pytest.approx(summary["clear"]["loss"], rel=0.1)


def test_the_private_training_accounts_for_itself(finished):
    private = json.loads(finished[1].stdout)["private"]
    assert private["leakage"]["nats_per_example"] == 0
    assert private["leakage"]["words"]
    assert all(isinstance(words, str) for words in private["not_covered"])
    assert all(private["integrity"]["passed"][kind] > 0 for kind in ("forward", "grad_input", "grad_weight"))
    assert private["integrity"]["failed"] == 0
    masked = [layer["name"] for layer in private["layers"] if layer["where"] == "masked"]
    assert masked == ["layers.1", "layers.3", "layers.5"]
    assert private["traffic"]["sent_bytes"] > 1e6
    assert private["traffic"]["received_bytes"] > 1e6
    times = private["time"]
    assert times["total_seconds"] == private["seconds"]
    assert times["enclave_seconds"] + times["waiting_seconds"] == pytest.approx(times["total_seconds"])
    assert times["enclave_seconds"] > 0
    assert times["worker_seconds"] > 0


def test_the_worker_cannot_rebuild_the_images(finished):
    view = json.loads(finished[1].stdout)["view"]
    assert abs(view["correlation"]) < 0.05


def test_the_files_are_complete_and_nothing_else_is_left(finished):
    folder, done = finished
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["checkpoints", "shares.png", "summary.json"]
    names = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert names == ["best.json", "best.safetensors", "step-00000006"]
    assert (folder / "run" / "shares.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "run" / "summary.json").read_text()) == json.loads(done.stdout)


def test_progress_goes_to_stderr_line_by_line(finished):
    lines = finished[1].stderr.splitlines()
    for label in ("clear", "private"):
        assert [line for line in lines if line.startswith(label) and "epoch 1/1" in line]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The same training again, without the clear one, for people: a table, and bars on a terminal."""
    folder = tmp_path_factory.mktemp("watched")
    leader, follower = pty.openpty()
    process = start(*QUICK, "--no-clear", "--learning-rate", "0.2", "--seed", "5", cwd=folder, stderr=follower)
    os.close(follower)
    seen = b""
    while chunk := read(leader):
        seen += chunk
    os.close(leader)
    table, _ = process.communicate(timeout=60)
    return folder, subprocess.CompletedProcess(process.args, process.returncode, table, seen.decode())


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""


def test_the_table_is_short_and_fits_80_columns(watched):
    _, done = watched
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert len(done.stdout.splitlines()) <= 40
    for words in (
        "K=4, M=1, 6 workers",
        "accuracy, private",
        "not trained (--no-clear)",
        "leakage",
        "not covered",
        "checks passed",
        "in the enclave",
        "sent",
        "darknight-train/shares.png",
    ):
        assert words in done.stdout, words


def test_a_terminal_gets_bars(watched):
    for words in ("━", "epoch 1/1", "accuracy"):
        assert words in watched[1].stderr


def test_the_setting_of_the_paper_trains_and_says_what_it_does_not_cover(tmp_path):
    done = warm_darknight(*QUICK, "--no-clear", "--arithmetic", "paper", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    private = json.loads(done.stdout)["private"]
    assert any("gradients go to workers in the clear" in caveat for caveat in private["not_covered"])
    assert private["leakage"]["nats_per_example"] > 0


def test_the_same_seed_gives_the_same_private_training(watched, finished):
    first = json.loads(finished[1].stdout)["private"]
    again = json.loads((watched[0] / "darknight-train" / "summary.json").read_text())["private"]
    assert (first["loss"], first["accuracy"]) == (again["loss"], again["accuracy"])


def start(*arguments, cwd, stderr):
    program = ["-m", "darknight.cli", *arguments]
    return warm.start(program, cwd=cwd, env=clean_environment(), stdout=subprocess.PIPE, stderr=stderr)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Ctrl-C in the second epoch: what was said."""
    folder = tmp_path_factory.mktemp("interrupted")
    settings = ("--epochs", "400", "--no-clear", "--no-picture", "--schedule", "cosine", "--optimizer", "adamw")
    process = start(*QUICK, *settings, "--learning-rate", "1e-3", cwd=folder, stderr=subprocess.PIPE)
    said = ""
    while "epoch 1/400" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    return folder, said + rest


def test_an_interrupt_saves_and_says_how_to_go_on(interrupted):
    folder, said = interrupted
    assert "Traceback" not in said
    assert re.search(r"epoch 1/400 .* s  \d+:\d\d:\d\d left\n", said)
    found = re.search(
        r"darknight: interrupted after step (\d+) of 2400; saved\. "
        r"Go on with: darknight train --resume --output darknight-train\n$",
        said,
    )
    assert found
    assert [path.name for path in (folder / "darknight-train").iterdir()] == ["checkpoints"]
    assert (folder / "darknight-train" / "checkpoints" / f"step-{int(found[1]):08}").is_dir()


@pytest.fixture
def refusal(interrupted, monkeypatch, capsys):
    """The one line with which the command, in this process and where that training stopped, refuses to run."""
    monkeypatch.chdir(interrupted[0])
    for name in [name for name in os.environ if name.startswith("DARKNIGHT_")]:
        monkeypatch.delenv(name)

    def refusing(*arguments):
        code = run(list(arguments))
        said = capsys.readouterr()
        return refused(subprocess.CompletedProcess(arguments, code, said.out, said.err), 2)

    return refusing


def test_a_training_that_stopped_is_not_overwritten_by_accident(refusal):
    line = refusal(*QUICK)
    assert "has a training that stopped after step" in line
    assert "Go on with --resume" in line


def test_a_resume_refuses_other_settings(refusal):
    line = refusal("train", "--resume", "--learning-rate", "0.5")
    assert "--learning-rate: the training in darknight-train/checkpoints was started with another value" in line
    assert "another epochs" in refusal("train", "--resume", "--epochs", "500")  # the cosine depends on their number
    assert "there is no checkpoint in nowhere" in refusal("train", "--resume", "--checkpoints", "nowhere")
    assert not os.path.exists("nowhere")


def test_a_resume_keeps_its_place(refusal):
    assert "use one of structure, cost, workers" in refusal("train", "--output", "other", "--place", "cloud")
    line = refusal("train", "--resume", "--place", "workers")
    assert "--place: the training in darknight-train/checkpoints was started with another value" in line


def test_a_training_by_cost_says_where_each_layer_was(tmp_path):
    done = warm_darknight(*QUICK, "--no-clear", "--place", "cost", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["settings"]["place"] == "cost"
    layers = {layer["name"]: layer for layer in summary["private"]["layers"]}
    assert layers.keys() == {"layers.1", "layers.3", "layers.5"}
    # An MLP for digits is next to nothing: on every machine it is cheaper to compute than to send.
    assert all("cheaper to compute" in layer["why"] and layer["calls"] > 0 for layer in layers.values())
    assert (summary["private"]["traffic"]["sent_bytes"], summary["view"]) == (0, None)


def test_killed_and_resumed_it_ends_as_if_nothing_had_been(tmp_path, full):
    """Resumed without any other flag: all the rest is taken from the checkpoint."""
    settings = ("--epochs", "3", "--no-clear", "--no-picture", "--schedule", "one-cycle", "--save-every", "0")
    process = start(*QUICK, *settings, cwd=tmp_path, stderr=subprocess.PIPE)
    while "epoch 1/3" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    again = warm_darknight("train", "--resume", "--no-picture", "--tensorboard", "curves", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    other = json.loads(again.stdout)
    assert other["private"]["resumed_at_step"] >= 1
    assert other["settings"]["recipe"]["schedule"] == "one-cycle"
    assert len(other["private"]["epochs"]) == 3
    assert other["view"] is None
    assert list((tmp_path / "curves").iterdir())
    if full:  # tests/train has the same, without the command
        whole = warm_darknight(*QUICK, *settings, "--output", "whole", "--json", cwd=tmp_path)
        assert json.loads(whole.stdout)["settings"] == other["settings"]
        files = [tmp_path / run / "checkpoints/step-00000018/model.safetensors" for run in ("whole", "darknight-train")]
        one, two = map(load_file, files)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_budget_stops_it_before_the_step_that_would_exceed_it_and_a_larger_one_goes_on(tmp_path):
    """The budget comes from darknight.toml, as any setting may."""
    (tmp_path / "darknight.toml").write_text(
        '[train]\narithmetic = "real"\nnoise-std = 1000.0\nleakage-budget = 0.001\n'
    )
    stopped = warm_darknight(*QUICK, "--inputs", "1", "--no-picture", "--no-clear", cwd=tmp_path)
    assert stopped.returncode == 1
    assert "darknight: error: one more step" in stopped.stderr
    assert "what was reached is saved. Go on with: darknight train --resume" in stopped.stderr
    (tmp_path / "darknight.toml").unlink()
    again = warm_darknight("train", "--resume", "--no-picture", cwd=tmp_path)  # the checkpoint knows it
    assert again.returncode == 1
    assert "0.001 of leakage_budget are used" in again.stderr
    done = warm_darknight("train", "--resume", "--leakage-budget", "1", "--no-picture", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    leakage = json.loads(done.stdout)["private"]["leakage"]
    assert 0.001 < leakage["nats_per_example"] < 1
    assert leakage["budget"] == {"nats": 1.0, "left": pytest.approx(1 - leakage["nats_per_example"])}
    assert leakage["paper"]["theorem"] == 1


@pytest.mark.parametrize("loaded", ["darknight.cli.app", "darknight.cli.train", "darknight.runtime"])
def test_an_interrupt_while_it_starts_ends_with_130(tmp_path, loaded):
    """Ctrl-C while torch is being loaded: here the import of our own module stands for that."""
    script = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {loaded!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.argv = ['darknight', 'train']\n"
        "from darknight.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
