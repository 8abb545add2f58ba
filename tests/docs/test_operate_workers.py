"""The manual for operators: its commands run as written, its flags exist, the errors that it explains are raised."""

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import warm
from darknight.wire.plan import ATTACKS
from darknight.worker.metrics import Metrics
from docs.walkthrough import blocks, walked

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "operate-workers.md"


@pytest.fixture(scope="module")
def walk(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("walk")
    return walked(PAGE, folder, ports=("7001", "7002", "7003", "9464")), folder


def test_the_commands_run_as_written(walk):
    done, folder = walk
    assert done.returncode == 0, done.stdout
    assert "No operator can unmask the data" in " ".join(done.stdout.split())
    assert re.search(r"^serving$", done.stdout, flags=re.MULTILINE)
    tasks = re.findall(
        r'^darknight_worker_tasks_total\{outcome="done",pass="forward"\} (\S+)', done.stdout, re.MULTILINE
    )
    assert float(tasks[0]) > 0
    assert done.stdout.count("stopped tasks_cut_off=0") == 5  # three workers, and one of them three times
    assert "north (1 worker), south (1 worker), east (1 worker)" in done.stdout
    assert json.loads((folder / "run" / "summary.json").read_text())


def test_the_attack_is_one_and_is_said_so(walk):
    done, folder = walk
    assert len(re.findall(r" lied layer=\S+ call=\d+ pass=\S*grad_weight attack=one-element$", done.stdout, re.M)) == 1
    assert re.search(r"^  HOSTILE +it lies on purpose: one-element", (folder / "hostile.txt").read_text(), re.M)
    assert "HOSTILE" not in (folder / "south.txt").read_text()
    (evidence,) = json.loads((folder / "attacked" / "summary.json").read_text())["private"]["integrity"]["blamed"]
    said = "{worker} is out: {finding} (layer {layer}, call {call}, {kind})".format(**evidence)
    (shown,) = [block for block in blocks(PAGE, "text") if "is out" in block]
    assert re.sub(r"\d+", "N", said) == re.sub(r"\d+", "N", shown.strip())
    assert "is out: a wrong answer" in done.stdout


def test_every_attack_of_the_table_is_one_and_none_is_missing():
    table = PAGE.read_text().split("| attack | what it does |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([a-z-]+)`", table)) == {*ATTACKS, "seed", "factor"}


def test_what_a_worker_prints_is_what_the_page_shows(walk):
    _, folder = walk
    (shown,) = [block for block in blocks(PAGE, "text") if "listening" in block]
    printed = (folder / "south.txt").read_text()
    for line in shown.splitlines():
        words = line.split()[0] if line.startswith("  ") else line
        if line.startswith("address"):
            words = "address = "
        elif "north" in line:
            words = line.replace("north", "south").split("/")[0].strip()
        elif line == "...":
            continue
        assert words in printed, line


def test_every_flag_of_a_worker_exists():
    text = "\n".join(blocks(PAGE, "sh") + blocks(PAGE, "console")).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.search(r"darknight[. ]worker --", line)]
    used = {flag for line in lines for flag in re.findall(r" (--[a-z-]+)", line)}
    used |= set(re.findall(r"`(--[a-z-]+)", PAGE.read_text())) - {"--help"}
    done = warm.run(["-m", "darknight.worker", "--help"], cwd=ROOT, env=os.environ)
    known = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", done.stdout, flags=re.MULTILINE))
    assert len(used) > 12
    assert used <= known


def test_every_error_in_the_table_is_one_that_is_raised():
    table = PAGE.read_text().split("| it says |")[1]
    messages = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert len(messages) > 12
    constants = [
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    missing = [message for message in messages if not any(message in constant for constant in constants)]
    assert not missing


def test_every_metric_in_the_table_exists():
    named = set(re.findall(r"`(darknight_worker_[a-z_]+)", PAGE.read_text()))
    found = {name for metric in Metrics().registry.collect() for name in (metric.name, f"{metric.name}_total")}
    assert len(named) >= 8
    assert named <= found


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", PAGE.read_text())
    assert links
    assert all((PAGE.parent / link).exists() for link in links)
