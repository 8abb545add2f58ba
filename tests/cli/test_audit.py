"""darknight audit: what it writes, and the exit status that a script relies on."""

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from audit.scenes import attack, broken, finding
from cli.command import darknight, refused
from darknight.audit import Must
from darknight.cli import audit as command
from darknight.cli.app import run
from darknight.cli.audit_table import audit_table
from darknight.cli.files import OutputFolder
from darknight.cli.progress import display_on
from darknight.data import read_dataset
from darknight.errors import DarKnightError, UsageError

LEAK = finding(target="a scheme that leaks", low=0.5, value=0.6, high=0.7)
BLUNT = broken(target="control: a blunt attack", low=0.0, value=0.1, high=0.15)
UNCLEAR = finding(target="nobody knows", high=0.6)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def performed(*findings):
    with display_on(Console(stderr=True)) as display:
        return command.perform(read_dataset("digits", seed=0), [attack(*findings)], quick=True, seed=0, display=display)


def test_all_well_is_silent():
    command.refuse_surprises(performed(finding(), broken(), finding(must=Must.SHOW, high=0.9)))


@pytest.mark.parametrize("surprise", [LEAK, BLUNT, UNCLEAR], ids=lambda surprise: surprise.target)
def test_what_is_not_as_it_must_be_is_named(surprise):
    with pytest.raises(DarKnightError, match=f"did not pass. probe, {surprise.target}: {surprise.outcome}, and must"):
        command.refuse_surprises(performed(finding(), broken(), surprise))


@pytest.mark.parametrize(
    ("findings", "code"),
    [((finding(), broken()), 0), ((finding(), broken(), LEAK), 1), ((finding(), BLUNT), 1), ((UNCLEAR, broken()), 1)],
    ids=["all well", "an attack succeeded", "a control failed", "undecided"],
)
def test_the_exit_status(here, monkeypatch, capsys, findings, code):
    monkeypatch.setattr(command, "ATTACKS", (attack(*findings),))
    assert run(["audit", "--quick", "--output", "out", "--json"]) == code
    done = capsys.readouterr()
    summary = json.loads(done.out)
    assert summary == json.loads(Path("out/audit.json").read_text())
    assert summary["passed"] is (code == 0)
    assert summary["files"] == {"page": "out/audit.html", "summary": "out/audit.json"}
    assert Path("out/audit.html").read_text().startswith("<!DOCTYPE html>")  # also if it did not pass: it says why
    assert ("the audit did not pass" in done.err) is (code == 1)
    assert sorted(os.listdir("out")) == ["audit.html", "audit.json"]


def test_ctrl_c_writes_nothing(here, monkeypatch):
    def interrupted(scene):
        raise KeyboardInterrupt

    stopped = attack(finding())
    object.__setattr__(stopped, "run", interrupted)
    monkeypatch.setattr(command, "ATTACKS", (stopped,))
    assert run(["audit", "--output", "out"]) == 130
    assert not os.listdir("out")


def test_attacks_are_chosen_by_name_in_their_order():
    suite = [attack(finding(), key=key) for key in ("one", "two", "three")]
    assert [each.key for each in command.choose([], suite)] == ["one", "two", "three"]
    assert [each.key for each in command.choose(["three", "one"], suite)] == ["one", "three"]
    with pytest.raises(UsageError, match=r"unknown attack four; use one of one, two, three\."):
        command.choose(["four", "one"], suite)


@pytest.mark.parametrize(
    ("arguments", "complaint", "code"),
    [
        ("--attack guess", "unknown attack guess; use one of one-share, averaging, coalitions", 2),
        ("--data imagenet", "unknown data 'imagenet'", 2),
        ("--seed -1", "--seed -1", 2),
        ("--colour", "--colour", 2),
        ("--quick --output file", "cannot write file", 1),
    ],
)
def test_bad_settings_are_refused(here, capsys, arguments, complaint, code):
    Path("file").touch()
    assert run(["audit", *arguments.split()]) == code
    assert complaint in capsys.readouterr().err
    assert os.listdir() == ["file"]


@pytest.mark.parametrize("text", ['attack = "guess"', 'attack = ["guess"]'])
def test_the_settings_file_takes_one_attack_or_several(here, capsys, text):
    Path("darknight.toml").write_text(f"[audit]\n{text}\n")
    assert run(["audit"]) == 2
    assert "unknown attack guess" in capsys.readouterr().err


def test_the_table_fits_and_marks_what_is_wrong(here):
    console = Console(width=80, record=True, file=StringIO())
    found = performed(finding(), broken(), LEAK, finding(must=Must.SHOW))
    console.print(audit_table(found, command.write(found, OutputFolder(Path("out")))))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for words in ("NOT PASSED", "1. The probe", "✓ failed", "✓ succeeded", "✗ succeeded", "● shown", "out/audit.html"):
        assert words in text, words
    assert "0.010 [−0.020, 0.040]" in text


@pytest.mark.full
def test_one_attack_for_real(tmp_path):
    done = darknight("audit", "--quick", "--attack", "coalitions", "--output", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "everything is as it must be" in done.stdout
    assert refused(darknight("audit", "--attack", "none", cwd=tmp_path), 2)
