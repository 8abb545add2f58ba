"""Every block of the how-tos runs, in order, as one script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import warm

HOWTOS = sorted((Path(__file__).resolve().parents[2] / "docs" / "howto").glob("*.md"))
WALKED_ELSEWHERE = {"audit", "deploy-enclave", "operate-workers", "plan"}  # by tests of their own in this folder

WITH_LIBRARIES = {"use-with-lightning-and-hugging-face"}  # tests/examples runs the scripts that this one shows


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(), flags=re.DOTALL)


WITH_PYTHON = [page for page in HOWTOS if blocks(page, "python") and page.stem not in WITH_LIBRARIES]
WITH_COMMANDS = [page for page in HOWTOS if blocks(page, "sh") and page.stem not in WALKED_ELSEWHERE | WITH_LIBRARIES]


def test_every_howto_is_run():
    assert HOWTOS
    run_here = {page.stem for page in WITH_PYTHON + WITH_COMMANDS}
    assert {page.stem for page in HOWTOS} == run_here | WALKED_ELSEWHERE | WITH_LIBRARIES


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_a_howto_runs_as_written(page):
    namespace = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), namespace)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_howto_run_as_written(page, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DARKNIGHT_")}
    (own := tmp_path / "bin").mkdir()
    paths = (warm.command(own), Path(sys.executable).parent, environment["PATH"])
    environment["PATH"] = os.pathsep.join(map(str, paths))
    # The output goes to a file: a process that stayed behind would keep a pipe open, and hold up the test.
    with (tmp_path / "said.txt").open("w+") as said:
        done = subprocess.run(
            ["bash", "-c", "set -euo pipefail\n" + "\n".join(blocks(page, "sh"))],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
    assert done.returncode == 0, (tmp_path / "said.txt").read_text()


@pytest.mark.parametrize("page", HOWTOS, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
    assert all((page.parent / link).exists() for link in links)
