"""Runs the real command in a process of its own: `darknight` from nothing, `warm_darknight` at once (see warm.py)."""

import os
import subprocess
import sys
from pathlib import Path

import warm


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment without settings of whoever runs the tests. One thread: the networks are tiny."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DARKNIGHT_")}
    return {**kept, "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", **variables}


def darknight(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "darknight.cli", *arguments],
        cwd=cwd,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def warm_darknight(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "darknight.cli", *arguments], cwd=cwd, env=clean_environment(**variables))


def refused(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line that the command says before it gives up."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("darknight: error: ")
    return line
