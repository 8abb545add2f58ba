"""What the worker's files tell an operator to type fits together."""

import re
from pathlib import Path

import pytest

from darknight import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "docs" / "howto" / "operate-workers.md", ROOT / "worker-package" / "README.md"]


def test_the_image_that_is_built_is_the_image_that_runs():
    tags = set(re.findall(r"--tag (\S+)", (ROOT / "deploy" / "Dockerfile").read_text()))
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    (pod,) = [found["spec"]["template"]["spec"] for found in documents if found["kind"] == "Deployment"]
    assert {each["image"] for each in [*pod["containers"], *pod["initContainers"]]} == {
        f"darknight-worker:{__version__}"
    }
    assert tags == {f"darknight-worker:{__version__}", "darknight-worker"}  # the second one is for `docker run` there


def test_it_is_installed_from_the_wheel_that_is_built_here():
    for path in DOCUMENTS:
        text = path.read_text()
        assert "pip wheel --no-deps ./worker-package" in text
        assert "pip install ./darknight_worker-*.whl" in text
    deployed = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    for path in [*DOCUMENTS, *deployed, *(ROOT / "src" / "darknight" / "worker").glob("*.py")]:
        assert not re.search(r"pip install '?darknight-worker", path.read_text())  # it is on no index
