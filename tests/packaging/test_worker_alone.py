"""The worker's own wheel, where nothing else is: only the distributions that it requires, and no trusted room."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from darknight import __version__
from darknight.ops import field
from darknight.types import Pass
from darknight.wire.identity import ENCLAVE, Identity, fingerprint
from worker.stations import OP, PRIME, Program, residues

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "darknight"
ROOMS = ("ops", "wire", "worker")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing of an earlier build gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    for name in ("src", "worker-package"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--wheel-dir", folder / "dist", folder / "worker-package"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((folder / "dist").glob("darknight_worker-*.whl"))


def test_the_wheel_contains_the_workers_rooms_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    top = {"__init__.py", "errors.py", "memory.py", "types.py", "py.typed"}
    rooms = {str(path.relative_to(PACKAGE)) for room in ROOMS for path in (PACKAGE / room).glob("**/*.py")}
    assert names == {f"darknight/{name}" for name in top | rooms}
    assert wheel.name == f"darknight_worker-{__version__}-py3-none-any.whl"


def test_it_requires_what_the_whole_project_requires_of_the_same_distributions():
    """One table of versions for both: what the worker needs, darknight needs in the same versions."""
    alone = tomllib.loads((ROOT / "worker-package" / "pyproject.toml").read_text())["project"]["dependencies"]
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(alone) <= set(whole)


def required(names: list[str], seen: dict[str, Distribution]) -> dict[str, Distribution]:
    """These distributions, and all that they require here, from their metadata."""
    for name in names:
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:
            continue
        try:
            seen[key] = distribution(name)
        except PackageNotFoundError:
            pytest.fail(f"{name} is required and not installed here")
        entries = [Requirement(text) for text in seen[key].requires or []]
        required([e.name for e in entries if e.marker is None or e.marker.evaluate({"extra": ""})], seen)
    return seen


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """An interpreter whose only packages are the wheel and links to what the wheel requires."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, with_pip=False)
    packages = next((folder / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        needs = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", archive.read(metadata).decode(), re.MULTILINE)
    assert "torch" in needs
    for found in required(needs, {}).values():
        for part in {Path(file).parts[0] for file in found.files or [] if Path(file).parts[0] not in ("..", "/")}:
            source = Path(str(found.locate_file(part)))
            if source.exists() and not (packages / part).exists():
                (packages / part).symlink_to(source)
    return folder / "bin" / "python"


def test_no_trusted_room_and_no_other_package_is_there(python, tmp_path):
    others = sorted({path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} - set(ROOMS))
    assert {"coding", "randomness", "fleet", "runtime", "cli"} <= set(others)
    modules = [*(f"darknight.{room}" for room in others), "typer", "rich", "matplotlib", "pytest", "ray"]
    script = "import sys, importlib.util as u; print([m for m in sys.argv[1:] if u.find_spec(m)])"
    command = [python, "-c", script, *modules, "darknight.worker"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "['darknight.worker']"


def environment() -> dict[str, str]:
    """Without a way back to this environment or tree."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DARKNIGHT"))}


def test_the_worker_starts_serves_and_stops_where_nothing_else_is(python, tmp_path):
    enclave = Identity.load_or_create(tmp_path / "enclave", ENCLAVE)
    arguments = ("--allow-enclave", tmp_path / "enclave" / "certificate.pem", "--state", tmp_path / "state")
    with open(tmp_path / "log", "w") as log:
        program = Program(*arguments, python=python, environment=environment(), stderr=log)
    try:
        assert fingerprint((tmp_path / "state" / "certificate.pem").read_bytes()) in program.printed
        with open(f"/proc/{program.process.pid}/maps") as maps:
            assert str(ROOT / "src") not in maps.read()
        with program.connect(enclave) as one:
            one.weights(residues(7, 5, seed=1))
            answer = one.forward(residues(3, 5), 7).result(60)
        expected = field.forward(OP, residues(3, 5), residues(7, 5, seed=1), PRIME)
        assert torch.equal(answer.tensors[Pass.FORWARD], expected)
        assert program.stop() == 0, (tmp_path / "log").read_text()
    finally:
        program.end()


@pytest.mark.full
def test_an_empty_environment_gets_everything_that_the_wheel_needs(wheel, tmp_path):
    venv.create(tmp_path / "environment", with_pip=True)
    python = tmp_path / "environment" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", wheel], cwd=tmp_path, check=True)
    command = [tmp_path / "environment" / "bin" / "darknight-worker", "--help"]
    assert "exit codes" in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
