"""darknight seal: what it makes, what it says, what it refuses, and how it is stopped."""

import json
import os
import pty
import signal
import stat
import subprocess
import time

import numpy as np
import pytest

import warm
from cli.command import clean_environment, darknight, warm_darknight
from darknight.cli.app import run
from data import makers


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, which is quicker, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DARKNIGHT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def command(*arguments):
        code = run(list(arguments))
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return command


def said_of(here, *arguments, code=1):
    """The last line of a refusal: what was going on may stand above it."""
    done = here("seal", *arguments)
    assert done.returncode == code
    assert done.stdout == ""
    return done.stderr.splitlines()[-1]


def test_help_has_an_example_and_the_exit_codes(here):
    done = here("seal", "--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert "darknight seal pictures --out sealed" in text
    assert "darknight seal sealed --verify --key sealed.key" in text
    for words in ("0 done", "1 a DarKnight error", "2 bad usage", "130 interrupted"):
        assert words in text
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_set_is_sealed_and_verified(tmp_path):
    done = darknight("seal", "digits", "--out", "sealed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sealing 1,797" in done.stderr
    for words in (
        "1,437 for training, 360 for testing",
        "1,797 records of 256 bytes",
        "sealed.key",
        "Keep the key file",
    ):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert {path.name for path in tmp_path.iterdir()} == {"sealed", "sealed.key"}
    assert stat.S_IMODE((tmp_path / "sealed.key").stat().st_mode) == 0o600
    key = (tmp_path / "sealed.key").read_text().split()[4]
    assert len(key) == 64
    again = warm_darknight("seal", "sealed", "--verify", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert key not in done.stdout + done.stderr + again.stdout + again.stderr
    assert json.loads(again.stdout) == {
        "folder": "sealed",
        "key": "sealed.key",
        "verified": True,
        "seen": {
            "manifest": json.loads(again.stdout)["seen"]["manifest"],
            "records": 1797,
            "record_bytes": 256,
            "head_bytes": (tmp_path / "sealed" / "head").stat().st_size,
            "bytes": sum(path.stat().st_size for path in (tmp_path / "sealed").iterdir()),
        },
        "data": {
            "name": "digits",
            "shape": [1, 8, 8],
            "classes": 10,
            "train_examples": 1437,
            "test_examples": 360,
            "labelled": 1797,
        },
    }


def test_the_key_may_be_elsewhere_and_settings_have_an_effect(here, tmp_path):
    (tmp_path / "keys").mkdir()
    done = here(
        "seal", "digits", "--out", "sealed", "--key", "keys/mine", "--test-share", "0.5", "--seed", "3", "--json"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["data"]["test_examples"] == 899
    assert summary["key"] == "keys/mine"
    assert not (tmp_path / "sealed.key").exists()
    assert "no such file" in said_of(here, "sealed", "--verify").lower()
    found = here("seal", "sealed", "--verify", "--key", "keys/mine")
    assert (found.returncode, "every record opens" in found.stdout) == (0, True)


def test_data_without_labels_are_sealed_and_verified(here, tmp_path):
    np.savez(tmp_path / "bare.npz", x=np.zeros((31, 3, 6, 5), dtype=np.uint8))
    done = here("seal", "bare.npz", "--out", "sealed")
    assert done.returncode == 0, done.stderr
    assert "31, without labels: for predictions alone" in done.stdout
    assert "classes" not in done.stdout
    found = here("seal", "sealed", "--verify")
    assert (found.returncode, "every record opens" in found.stdout) == (0, True)
    words = json.loads(here("seal", "sealed", "--verify", "--json").stdout)
    assert words["data"] == {
        "name": "bare.npz",
        "shape": [3, 6, 5],
        "classes": 0,
        "train_examples": 0,
        "test_examples": 31,
        "labelled": 0,
    }
    assert words["seen"].keys() == {"manifest", "records", "record_bytes", "head_bytes", "bytes"}
    assert "Leave out the test share" in said_of(here, "bare.npz", "--out", "new", "--test-share", "0.5", code=2)
    assert not (tmp_path / "new").exists()


def test_so_are_pictures_in_one_folder(here, tmp_path):
    makers.pictures(tmp_path / "pets", per_class=3)
    done = here("seal", "pets/train/cats", "--out", "sealed", "--image-size", "16", "--json")
    assert done.returncode == 0, done.stderr
    words = json.loads(done.stdout)
    assert (words["data"]["test_examples"], words["data"]["labelled"]) == (3, 0)
    assert words["seen"]["record_bytes"] == 3 * 16 * 16


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("digits", "Say --out FOLDER"),
        ("digits --out there", "there is there already"),
        ("digits --out new --key there", "there is there already. A key file"),
        ("digits --out new --key new/key", "would be handed over together"),
        ("digits --out nowhere/new", "there is no folder nowhere"),
        ("imagenet --out new", "unknown data 'imagenet'"),
        ("digits --out new --test-share 2", "test share of 2"),
        ("digits --out new --image-size 9", "only pictures in folders are scaled"),
        ("digits --out new --seed -1", "seed -1"),
        ("there --verify --out new", "drop --out"),
        ("there --verify --seed 1 --test-share 0.1", "drop --test-share, --seed"),
        ("", "Missing argument"),
    ],
)
def test_bad_usage_is_refused_and_makes_nothing(here, tmp_path, arguments, complaint):
    (tmp_path / "there").mkdir()
    assert complaint in said_of(here, *arguments.split(), code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_sealed_set_is_no_data_for_other_commands_which_say_whose_it_is(here):
    here("seal", "digits", "--out", "sealed")
    done = here("train", "--data", "sealed")
    assert done.returncode == 2
    assert "sealed: a sealed set, which an enclave opens: darknight submit." in done.stderr


def test_rows_of_a_table_are_said_to_be_numbers(here, tmp_path):
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "1,2,x\n3,4,y\n" * 5)
    assert "2 numbers, one of 2 classes" in here("seal", "rows.csv", "--out", "sealed").stdout


def test_a_set_that_was_changed_is_refused_in_one_line(here, tmp_path):
    here("seal", "digits", "--out", "sealed")
    here("seal", "digits", "--out", "other")
    said = said_of(here, "sealed", "--verify", "--key", "other.key")
    assert "another sealed set" in said
    assert "or the key that belongs to the folder" in said
    path = tmp_path / "sealed" / "records"
    content = bytearray(path.read_bytes())
    content[272 * 1000 + 5] ^= 1
    path.write_bytes(content)
    assert "record 1000: is not the one that was sealed there" in said_of(here, "sealed", "--verify")
    path.write_bytes(content[:-1])
    assert "cut short or extended" in said_of(here, "sealed", "--verify")
    (tmp_path / "sealed.key").chmod(0o644)
    assert "other accounts may open it" in said_of(here, "sealed", "--verify")


def test_bad_data_leave_nothing(here, tmp_path):
    (tmp_path / "bad.csv").write_text("a,label\n1,x\nnan,y\n")
    assert "not a finite number" in said_of(here, "bad.csv", "--out", "sealed")
    assert {path.name for path in tmp_path.iterdir()} == {"bad.csv"}


# --- stopping it ------------------------------------------------------------------------------------------------------
def large(folder, records=400):
    x = np.zeros((records, 3, 600, 601), dtype=np.uint8)
    np.savez(folder / "large.npz", x=x, y=np.arange(records) % 2)


def test_ctrl_c_leaves_nothing(tmp_path):
    large(tmp_path)
    process = warm.start(
        ["-m", "darknight.cli", "seal", "large.npz", "--out", "sealed"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / ".sealed.unfinished" / "records").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, complaint
    assert said == ""
    assert complaint.splitlines()[-1] == "darknight: interrupted; nothing was kept."
    assert {path.name for path in tmp_path.iterdir()} == {"large.npz"}


def test_a_terminal_gets_a_bar(tmp_path):
    large(tmp_path, records=20)
    master, slave = pty.openpty()
    environment = {**clean_environment(), "TERM": "xterm"}
    process = warm.start(
        ["-m", "darknight.cli", "seal", "large.npz", "--out", "sealed", "--json"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            more = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        shown += more
    os.close(master)
    assert process.wait(60) == 0
    assert b"sealing" in shown
    assert b"20 of 20" in shown
