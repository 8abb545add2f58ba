"""The README's example runs as written."""

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_example_runs_as_written():
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert examples
    for example in examples:
        assert len([line for line in example.splitlines() if line.strip()]) <= 16
        exec(compile(example, "README.md", "exec"), {})


def test_every_file_that_the_readme_names_exists():
    root = Path(__file__).resolve().parents[2]
    for name in re.findall(r"`(tests/[\w/.]+)`", README) + re.findall(r"\]\(([\w/.]+)\)", README):
        assert (root / name).exists(), name
