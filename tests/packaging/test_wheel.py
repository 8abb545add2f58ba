"""The built wheel, in a virtual environment of its own and outside the tree, is what the README says."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import torch
from torch import nn

import darknight as dk


def selected(name: str, module: nn.Module) -> bool:
    return name != "head"


def train(model: nn.Module, x: torch.Tensor) -> float:
    scheme: dk.Scheme = dk.Scheme(inputs=4, colluders=1, arithmetic=dk.Field(bits=9))
    with dk.local_fleet(scheme, record=True) as fleet, dk.Runtime(scheme, fleet, seed=1) as runtime:
        report = dk.protect_(model, runtime, where=selected, bounds={})
        loss: torch.Tensor = model(x).sum()
        for row in report.masked:
            print(row.name, row.where, row.why, row.flops)
        print(fleet.transcript(0)[0].kind, runtime.ledger.summary())
        nats: float = runtime.ledger.nats_per_example
    dk.unprotect_(model)
    return nats


try:
    print(train(nn.Linear(3, 2), torch.randn(8, 3)))
except dk.errors.DarKnightError as error:
    print(error)
"""


def run(*command, cwd, env=None):
    """The command's output; the test fails with everything it said if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(folder: Path, **environment: str) -> Path:
    """The wheel, built from a copy, so that nothing of an earlier build gets in."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    arguments = ["--no-deps", "--no-build-isolation", "--wheel-dir", folder / "dist"]
    run(*pip, "wheel", *arguments, folder, cwd=folder, env={**os.environ, **environment})
    return next((folder / "dist").glob("darknight-*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """An interpreter that has the wheel, and borrows what the wheel needs from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)  # ours can install there: one of its own would take seconds
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", python]
    run(*pip, "install", "--no-deps", wheel, cwd=folder)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def example(folder: Path) -> Path:
    script = folder / "example.py"
    script.write_text(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0])
    return script


def test_the_readmes_example_runs_from_the_wheel(python, tmp_path):
    home = run(python, "-c", "import darknight; print(darknight.__file__)", cwd=tmp_path).strip()
    assert Path(home).is_relative_to(python.parents[1])  # the wheel's, not the tree's
    assert "forward 6, grad_input 3, grad_weight 6 checks passed" in run(python, example(tmp_path), cwd=tmp_path)


def libraries(wheel: Path) -> list[str]:
    """The compiled files that it carries."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith((".so", ".dylib", ".pyd"))]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: nothing was compiled")
def test_the_wheel_carries_the_compiled_kernels_and_they_are_used(wheel, python, tmp_path):
    assert [name.partition(".")[0] for name in sorted(libraries(wheel))] == [
        "darknight/kernels/_depthwise",
        "darknight/kernels/_few_rows",
        "darknight/kernels/_field",
        "darknight/kernels/_keystream",
        "darknight/kernels/_layers",
        "darknight/kernels/_real",
        "darknight/kernels/_residues",
        "darknight/kernels/_unmasking",
        "darknight/kernels/_weights",
    ]
    script = (
        "from darknight.kernels import compiled_field, compiled_residues, compiled_weights\n"
        "print(None not in [each.chosen() for each in (compiled_field, compiled_residues, compiled_weights)])"
    )
    assert run(python, "-c", script, cwd=tmp_path).strip() == "True"


def test_without_a_compiler_the_wheel_is_built_without_kernels(tmp_path):
    wheel = built(tmp_path, CC=str(tmp_path / "missing"))
    assert libraries(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        assert "darknight/kernels/compiled.py" in archive.namelist()


@pytest.fixture(scope="module")
def mypy(python, tmp_path_factory) -> list:
    """What `make lint` found out about torch is not found out again."""
    cache, known = tmp_path_factory.mktemp("mypy") / "cache", ROOT / ".mypy_cache"
    if known.is_dir():
        shutil.copytree(known, cache)
    return [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--cache-dir", cache]


def test_a_users_script_passes_mypy_strict_and_runs(python, mypy, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert "Success" in run(*mypy, script, cwd=tmp_path)
    run(python, script, cwd=tmp_path)


def test_a_mistake_in_a_users_script_is_found_by_mypy(mypy, tmp_path):
    """The test above can fail: the package is typed, and seen."""
    script = tmp_path / "script.py"
    script.write_text('import darknight as dk\n\ndk.Scheme(inputs="four", colluders=1)\n')
    done = subprocess.run([str(part) for part in (*mypy, script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'Argument "inputs" to "Scheme" has incompatible type' in done.stdout


def test_the_command_is_installed(python, tmp_path):
    assert "train" in run(python.parent / "darknight", "--help", cwd=tmp_path)


@pytest.mark.full
def test_an_empty_environment_gets_everything_that_the_wheel_needs(wheel, tmp_path):
    venv.create(tmp_path / "environment", with_pip=True)
    python = tmp_path / "environment" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    run(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert "checks passed" in run(python, example(tmp_path), cwd=tmp_path)
