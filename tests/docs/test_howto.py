"""Every block of the how-tos runs, in order, as one script."""

import re
from pathlib import Path

import pytest

HOWTOS = sorted((Path(__file__).resolve().parents[2] / "docs" / "howto").glob("*.md"))


@pytest.mark.parametrize("page", HOWTOS, ids=lambda page: page.stem)
def test_a_howto_runs_as_written(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    namespace = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, page.name, "exec"), namespace)
