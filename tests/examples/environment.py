"""Pythons that have the libraries of the examples, besides everything that this one has."""

import importlib.util
import os
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from boundaries.house import ROOT

PYTHON = "DARKNIGHT_EXAMPLES_PYTHON"


def python_with(*modules: str) -> str:
    """An interpreter that can import `modules`: the one that DARKNIGHT_EXAMPLES_PYTHON names, this one, or a new one.

    A new one is an environment on top of this one with the extra `examples`, in .cache, and kept for the next run.
    Constraints keep torch and everything else that this one has as it is. Where PyPI is out of reach, it is a skip.
    """
    if named := os.environ.get(PYTHON):
        return named
    if all(importlib.util.find_spec(module) is not None for module in modules):
        return sys.executable
    folder = ROOT / ".cache" / f"examples-{sys.version_info.major}.{sys.version_info.minor}"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists():
        _make(folder, python)
        stamp.touch()
    return str(python)


def _make(folder: Path, python: Path) -> None:
    venv.create(folder, with_pip=True, clear=True)
    (packages,) = folder.glob("lib/*/site-packages")
    ours = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    (packages / "the_environment_below.pth").write_text(ours)
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["examples"]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    done = subprocess.run(
        [*pip, "--constraint", str(ROOT / "constraints.txt"), *extra], stderr=subprocess.PIPE, text=True
    )
    if done.returncode != 0 and "No matching distribution" in done.stderr:
        pytest.skip("no environment with the libraries of the examples: PyPI is out of reach")
    assert done.returncode == 0, done.stderr
