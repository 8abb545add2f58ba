"""Runs the scripts of experiments/ in this process, or in one of their own."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

from cli.command import clean_environment

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments"


def script(name, monkeypatch):
    """The module of a script. Its neighbours are found beside it, as when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module(name)


def run_here(name, monkeypatch, *arguments):
    """What `python experiments/NAME.py ARGUMENTS` does, without the seconds of loading torch."""
    module = script(name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [str(FOLDER / f"{name}.py"), *map(str, arguments)])
    module.main()


def start(name, *arguments, **variables):
    return subprocess.Popen(
        [sys.executable, str(FOLDER / f"{name}.py"), *map(str, arguments)],
        cwd=ROOT,
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
