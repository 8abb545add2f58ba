"""Every block of the how-tos runs, in order, as one script."""

import re
from pathlib import Path

import pytest

from docs.walkthrough import blocks, walked

HOWTOS = sorted((Path(__file__).resolve().parents[2] / "docs" / "howto").glob("*.md"))
WALKED_ELSEWHERE = {"audit", "deploy-enclave", "operate-workers", "plan"}  # by tests of their own in this folder

WITH_LIBRARIES = {"use-with-lightning-and-hugging-face"}  # tests/examples runs the scripts that this one shows


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
    done = walked(page, tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", HOWTOS, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
    assert all((page.parent / link).exists() for link in links)
