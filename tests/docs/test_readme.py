"""The README's example runs as written."""

import codeop
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_as_written():
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert examples
    for example in examples:
        assert len([line for line in example.splitlines() if line.strip()]) <= 15
        exec(compile(example, "README.md", "exec"), {})


def typed(text: str) -> None:
    """Takes the lines as Python does when they are pasted into its prompt; raises SyntaxError as it would."""
    waiting: list[str] = []
    for line in [*text.splitlines(), ""]:
        waiting.append(line)
        if codeop.compile_command("\n".join(waiting), symbol="single") is not None:
            waiting = []
    assert not any(waiting)


def test_the_example_can_be_pasted_into_the_prompt():
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    typed(example)
    with pytest.raises(SyntaxError):  # a block ends with an empty line there
        typed(re.sub(r"\n\n(?=dk\.unprotect_)", "\n", example))


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md"])
def test_every_file_that_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    named = re.findall(r"`(tests/[\w/.]+)`", text) + re.findall(r"\]\(([\w/.-]+)\)", text)
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


def test_the_two_commands_are_targets_of_the_makefile():
    commands = re.findall(r"^    make (\w+) ", README, flags=re.MULTILINE)
    assert commands == ["run", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command}:", makefile, flags=re.MULTILINE) for command in commands)
