"""The examples with other libraries: each runs with that library, and trains to the losses of the same script alone."""

import json
import os
import re
import subprocess

import pytest

from boundaries.house import ROOT
from examples.environment import python_with

EXAMPLES = ROOT / "examples"
_EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
sys.stdout.write(nbformat.writes(notebook))
"""


def run(*command):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(said):
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss ([\d.]+)$", said, flags=re.M)}


def rows(said, place):
    """(name, kind) of everything that the report puts there."""
    return re.findall(rf"^([\w.]+) +(\w+) +{place} +\d+ ", said, flags=re.M)


def side_by_side(python, name, figure, tolerance):
    """What the private run said, after its losses were compared with those of the plain one."""
    script = str(EXAMPLES / f"{name}.py")
    plain, said = losses(run(python, script, "--plain")), run(python, script)
    private = losses(said)
    assert plain.keys() == private.keys()
    first, last = min(plain), max(plain)
    assert plain[last] < 0.5 * plain[first], "it learns nothing, so it shows nothing"
    largest = max(abs(private[step] - plain[step]) for step in plain)
    figure(name, f"{last} steps, loss {plain[last]:.4f} plain, {private[last]:.4f} private; differ by {largest:.4f}")
    assert 0 < largest < tolerance
    shown = table_of(name)
    assert shown.keys() <= plain.keys()
    for step, losses_shown in shown.items():
        assert losses_shown == pytest.approx((plain[step], private[step]), abs=0.1), "the page shows other losses"
    return said


def table_of(name):
    """step -> (plain, private), of the table behind the command in the page about it."""
    page = (ROOT / "docs" / "howto" / "use-with-lightning-and-hugging-face.md").read_text()
    part = page.split(f"examples/side_by_side.py examples/{name}.py")[1].split("##")[0]
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|", part, flags=re.MULTILINE)
    assert len(rows) == 8
    return {int(step): (float(plain), float(private)) for step, plain, private in rows}


@pytest.mark.full
def test_lightning(figure):
    said = side_by_side(python_with("lightning"), "lightning_trainer", figure, 0.05)
    assert [kind for _, kind in rows(said, "masked")] == ["Conv2d", "Linear", "Linear"]


@pytest.mark.full
def test_hugging_face(figure):
    said = side_by_side(python_with("transformers", "accelerate"), "huggingface_trainer", figure, 0.02)
    masked, enclave = rows(said, "masked"), rows(said, "enclave")
    assert {kind for _, kind in masked} == {"Linear"}
    assert len(masked) == 14  # six in each of two layers, the pooler and the classifier
    assert "Linear" not in {kind for _, kind in enclave}
    assert [kind for _, kind in enclave].count("scaled_dot_product_attention") == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "modules"),
    [("lightning_switches", ["lightning"]), ("huggingface_switches", ["transformers", "accelerate"])],
)
def test_the_switches_of_a_library_work_on_a_protected_model(script, modules):
    here = ROOT / "tests" / "examples" / f"{script}.py"
    assert "all of it works" in run(python_with(*modules), str(here), str(EXAMPLES))


@pytest.mark.full
def test_the_notebook():
    notebook = json.loads(run(python_with("nbclient", "ipykernel"), "-c", _EXECUTE, str(EXAMPLES / "notebook.ipynb")))
    said = "".join("".join(output.get("text", "")) for cell in notebook["cells"] for output in cell.get("outputs", ()))
    assert len(rows(said, "masked")) == 2
    last = re.search(r"plain ([\d.]+), private ([\d.]+); largest difference ([\d.]+)", said)
    assert last is not None, said
    assert 0 < float(last[3]) < 0.02


@pytest.mark.full
def test_side_by_side_shows_the_table():
    said = run(python_with(), str(EXAMPLES / "side_by_side.py"), str(EXAMPLES / "plain_script.py"), "--steps", "3")
    assert [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("| ")] == [
        "step",
        "1",
        "2",
        "3",
    ]
    assert "Largest difference in 3 steps: 0.0" in said
