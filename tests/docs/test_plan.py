"""The page about planning: its commands run, its flags and defaults exist, its numbers are those of the code."""

import re
import subprocess
from pathlib import Path

import pytest

from cli.command import clean_environment
from darknight.cli.app import run
from darknight.plan import Speeds

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "plan.md"


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture
def plain(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "80")


def commands():
    return [block.replace("\\\n", " ").strip() for block in blocks("sh")]


@pytest.mark.parametrize("command", commands())
def test_a_command_runs_as_written(command, plain, capsys):
    words, _, fails = command.partition(" || test $? -eq ")
    assert run(words.split()[1:]) == int(fails or 0)
    said = capsys.readouterr()
    if fails:
        (shown,) = [block for block in blocks("text") if block.startswith("darknight: error")]
        assert said.err.splitlines()[-1] == shown.strip()
    else:
        assert "to run it" in said.out
    if "--unreliable" in command:
        (shown,) = [block for block in blocks("text") if "spares  " in block]
        assert shown in said.out


def test_the_shell_reads_the_commands_as_we_do():
    for command in commands():
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_the_defaults_of_the_table_are_those_of_the_code():
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([\d.]+) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert {name.replace("-", "_"): float(value) for name, value in rows} == vars(Speeds())


def test_every_file_that_the_page_names_exists():
    named = re.findall(r"python (benchmarks/\w+\.py)", PAGE.read_text())
    assert named
    assert all((ROOT / name).exists() for name in named)
