"""The public names of the package, and that naming the package loads nothing."""

import json
import subprocess
import sys
import tomllib

import pytest

import darknight
from boundaries.house import ROOT

PUBLIC = {
    "Field",
    "Real",
    "Runtime",
    "Scheme",
    "__version__",
    "connect",
    "errors",
    "local_fleet",
    "protect_",
    "unprotect_",
}


def test_the_public_names_are_these():
    assert set(darknight.__all__) == PUBLIC
    assert len(darknight.__all__) == len(PUBLIC)
    assert set(darknight._HOMES) == PUBLIC - {"__version__"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_resolves(name):
    assert getattr(darknight, name) is getattr(darknight, name)


def test_names_come_from_their_homes():
    from darknight import errors
    from darknight.coding import scheme

    assert darknight.errors is errors
    assert (darknight.Scheme, darknight.Field, darknight.Real) == (scheme.Scheme, scheme.Field, scheme.Real)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"'Schema'.*Scheme"):
        _ = darknight.Schema


def test_the_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert darknight.__version__ == project["version"]


def after(statement: str) -> dict[str, list[str]]:
    """Names listed by dir(darknight), and modules loaded, after a statement in a fresh interpreter."""
    script = (
        f"import json, sys\n{statement}\nprint(json.dumps({{'dir': dir(darknight), 'loaded': sorted(sys.modules)}}))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)


def heavy(modules: list[str]) -> list[str]:
    return [name for name in modules if name.split(".")[0] in {"torch", "numpy"} or name.startswith("darknight.")]


def test_importing_the_package_loads_no_room_and_no_torch():
    fresh = after("import darknight")
    assert not heavy(fresh["loaded"])
    assert set(fresh["dir"]) >= PUBLIC


def test_using_a_name_does_load_its_room():
    loaded = heavy(after("import darknight; darknight.Scheme")["loaded"])
    assert "darknight.coding.scheme" in loaded
