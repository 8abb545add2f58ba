"""examples/plain_script.py: the same losses with DarKnight and without it."""

import re
import runpy
import sys

import pytest

from boundaries.house import ROOT

SCRIPT = ROOT / "examples" / "plain_script.py"
EXAMPLES = ["plain_script", "lightning_trainer", "huggingface_trainer"]


def losses(monkeypatch, capsys, *options):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr().out
    return said, [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", said, flags=re.MULTILINE)]


def test_the_losses_of_private_and_plain_training_are_those_of_one_script(monkeypatch, capsys):
    _, plain = losses(monkeypatch, capsys, "--plain", "--steps", "12")
    said, private = losses(monkeypatch, capsys, "--steps", "12")
    assert len(plain) == len(private) == 12
    assert plain[-1] < plain[0] - 0.1
    assert private == pytest.approx(plain, abs=5e-3)
    assert private != plain, "it was not protected"
    assert re.findall(r"^\d+ +(\w+) +masked +12 ", said, flags=re.MULTILINE) == ["Conv2d", "Linear"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_an_ordinary_script_with_three_lines_of_ours(name):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    ours = [line for line in text.splitlines() if "dk." in line and '"""' not in line]
    assert [line.split("dk.")[1].split("(")[0] for line in ours] == ["Scheme", "local_fleet", "protect_", "unprotect_"]
