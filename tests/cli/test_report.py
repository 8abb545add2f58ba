"""darknight report: a page from files alone; what is no result is refused in one line, and then nothing is written."""

import json
import subprocess

import pytest

from cli.command import refused
from darknight.cli.app import run
from darknight.report.experiment_file import write_experiment
from report.measurements import everything


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    for name in ("features", "time-split"):
        write_experiment(folder / f"{name}.json", everything()[name])
    return folder


def report(capsys, *arguments):
    code = run(["report", *map(str, arguments)])
    said = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, code, said.out, said.err)


def test_the_page_and_its_figures(results, tmp_path, capsys):
    done = report(capsys, results, "--output", tmp_path / "page", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["missing"] == ["accuracy", "inference", "scaling"]
    assert summary["experiments"]["time-split"] == {"complete": 1, "missing": ["vgg16"]}
    files = {path.name: path.read_bytes() for path in (tmp_path / "page").iterdir()}
    assert sorted(files) == ["results.html", "speed-up.png", "time-split.png"]
    assert sorted(summary["files"]) == sorted(str(tmp_path / "page" / name) for name in files)
    again = report(capsys, results, "--output", tmp_path / "again")
    assert "python experiments/accuracy.py" in " ".join(again.stdout.split())
    assert max(map(len, again.stdout.splitlines())) <= 80
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == files


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("broken.json", '{"format": "darknight.exp', "broken.json: not JSON"),
        ("foreign.json", '{"ratios": {"ceiling": 3}}', "foreign.json: not a file of an experiment"),
        ("twice.json", json.dumps(everything()["features"].words()), "are both features"),
    ],
)
def test_what_is_no_result_is_refused_and_nothing_is_written(results, tmp_path, capsys, name, content, complaint):
    (results / name).write_text(content)
    assert complaint in refused(report(capsys, results, "--output", tmp_path / "page"), 1)
    assert not (tmp_path / "page").exists()


def test_folders_without_results(tmp_path, capsys):
    assert "no results" in refused(report(capsys, tmp_path, "--output", tmp_path / "page"), 1)
    assert "cannot be read" in refused(report(capsys, tmp_path / "absent", "--output", tmp_path / "page"), 1)
    assert "Missing argument" in refused(report(capsys), 2)


def test_files_that_are_being_written_are_left_alone(results, tmp_path, capsys):
    (results / ".scaling.json.17.tmp").write_text("{")
    (results / ".hidden.json").write_text("{")
    (results / "notes.txt").write_text("not ours")
    assert report(capsys, results, "--output", tmp_path / "page").returncode == 0
