"""What no file of the project may say, and what none may be called."""

import subprocess
from pathlib import PurePosixPath

import pytest

from boundaries.house import ROOT

# Written in two pieces, so that this file does not contain what it looks for.
MACHINE_PATH = "/" + "work/"
SHARED_PATH = "../" + "shared"


def offences(name: str, text: str) -> list[str]:
    found = []
    if MACHINE_PATH in text:
        found.append(f"{name}: names a path of one particular machine ({MACHINE_PATH})")
    if SHARED_PATH in text and name != ".ci/run":
        found.append(f"{name}: looks for {SHARED_PATH}; use the environment variable DARKNIGHT_SHARED")
    if PurePosixPath(name).name == "utils.py":
        found.append(f"{name}: call the file after what is in it")
    return found


def project_files() -> list[str]:
    """Every file that git tracks, or would with `git add --all`."""
    command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_the_files_of_the_project_are_clean():
    files = project_files()
    assert {"README.md", "tests/boundaries/test_text.py"} <= set(files)
    found = [
        offence
        for name in files
        for offence in offences(name, (ROOT / name).read_text(encoding="utf-8", errors="replace"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", f"open('{MACHINE_PATH}x')"),
        (".ci/run", f"cd {MACHINE_PATH}main"),
        ("docs/a.md", f"see {SHARED_PATH}/data"),
        ("src/darknight/coding/utils.py", ""),
        ("utils.py", ""),
    ],
)
def test_an_offence_is_found(name, text):
    assert offences(name, text)


def test_only_the_ci_script_may_look_beside_the_project():
    assert not offences(".ci/run", f"[ -d {SHARED_PATH} ]")
    assert not offences("src/darknight/coding/utility.py", "homework / sharing")
