"""The page about Lightning and Hugging Face shows what the examples do. tests/examples checks its tables."""

import re

from boundaries.house import ROOT

PAGE = (ROOT / "docs" / "howto" / "use-with-lightning-and-hugging-face.md").read_text()
SCRIPTS = ("lightning_trainer", "huggingface_trainer")


def of_ours(text):
    return [line.strip() for line in text.splitlines() if "dk." in line and '"""' not in line]


def test_the_blocks_are_the_lines_of_the_scripts():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == len(SCRIPTS)
    for name, block in zip(SCRIPTS, blocks, strict=True):
        script = (ROOT / "examples" / f"{name}.py").read_text()
        assert of_ours(block) == of_ours(script)
        assert re.search(r"trainer\.(fit|train)\(", block)[0] in script


def test_every_command_names_a_script():
    commands = re.findall(r"^python (\S+) (\S+)$", PAGE, flags=re.MULTILINE)
    assert [script for _, script in commands] == [f"examples/{name}.py" for name in SCRIPTS]
    assert all((ROOT / path).exists() for command in commands for path in command)


def test_the_tables_are_whole():
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 8 * len(SCRIPTS)
    for _, plain, private, difference in rows:
        assert abs(float(private) - float(plain) - float(difference)) < 2e-4
