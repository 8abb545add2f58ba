"""The page about the audit: its commands run as written, and its table is that of the suite."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from darknight.audit.attacks import ATTACKS
from darknight.cli.app import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "audit.md"
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) for line in block.splitlines()
]


def test_the_table_is_that_of_the_suite():
    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), flags=re.MULTILINE) == [each.key for each in ATTACKS]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_exist(command, capsys):
    """Everything up to the redirection, and --help, so that nothing runs; the full tests run it."""
    words = shlex.split(command.split(">")[0])
    assert words[:2] == ["darknight", "audit"]
    assert run([*words[1:], "--help"]) == 0
    known = capsys.readouterr().out
    assert all(word in known for word in words if word.startswith("--"))


@pytest.mark.full
def test_the_commands_run_as_written(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in COMMANDS:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=600)
        assert done.returncode == 0
    assert (tmp_path / "review" / "audit.html").stat().st_size > 10_000
    assert json.loads((tmp_path / "findings.json").read_text())["passed"] is True
