"""The other experiments, each at the smallest scale: what they write can be read and drawn."""

import math

import pytest

from darknight.accounting.theorems import theorem_1
from darknight.report.experiment_file import read_experiment
from darknight.report.results_folder import figures_of, read_results
from darknight.report.results_page import results_page
from experiments.scripts import run_here, script

pytestmark = pytest.mark.usefixtures("one_thread")


def test_inference_in_the_clear_agrees_with_itself(tmp_path, monkeypatch):
    quick = ("--quick", "--model", "vgg-small", "--setting", "clear")
    run_here("inference", monkeypatch, "--out", tmp_path / "a.json", *quick)
    (cell,) = read_experiment(tmp_path / "a.json").cells.values()
    assert cell["agreement"] == 1.0
    assert 0.5 < cell["top1"] <= cell["top5"] <= 1.0
    assert not any((tmp_path / "a.json.work").iterdir())


def test_leakage_is_that_of_the_theorem_and_smaller_for_the_systematic_code(monkeypatch):
    inference, settings = script("inference", monkeypatch), script("settings", monkeypatch)
    for noise in settings.TABLE_2.values():
        found = inference.leakage(noise, 0.0)
        if noise is not None:
            assert found["theorem"] == theorem_1(2, 1.0, 10.0, math.sqrt(noise.variance))
            assert found["systematic"] == pytest.approx(0.5 / noise.variance, rel=1e-6)
        else:
            assert found == {"theorem": 0.0, "dense": 0.0, "systematic": 0.0}


def test_the_sweeps_are_those_that_were_asked_for(monkeypatch):
    scaling = script("scaling", monkeypatch)
    flags = type("Flags", (), {"quick": False, "batch_size": 24, "noise_std": 2e4})()
    cells = scaling.cells(flags)
    assert [f"field/inputs={k}" in cells for k in range(1, 9)] == [True] * 8
    assert [f"field/colluders={m}" in cells for m in range(1, 4)] == [True] * 3
    for name, cell in cells.items():
        what, value = name.partition("/")[2].split("=")
        found = cell.batch if what == "batch" else getattr(cell.scheme, what)
        assert found == int(value)


def test_what_counts_as_linear(monkeypatch):
    time_split = script("time_split", monkeypatch)
    for name in ("aten::mkldnn_convolution", "aten::convolution_backward", "aten::addmm", "aten::mm", "aten::linear"):
        assert time_split.is_linear(name)
    for name in ("aten::batch_norm", "aten::relu_", "aten::max_pool2d", "aten::_foreach_add_", "aten::mean", "convert"):
        assert not time_split.is_linear(name)
    assert set(time_split.PARTS.values()) <= {"masking", "checking", "links", "staying", "optimizer"}


def test_a_test_is_run_and_its_outcome_known(monkeypatch):
    features = script("features", monkeypatch)
    assert features.outcome("tests/boundaries/test_text.py::test_an_offence_is_found", full=False) == "passed"


@pytest.mark.full
@pytest.mark.parametrize(("body", "outcome"), [("assert False", "failed"), ("pytest.skip('no')", "skipped")])
def test_a_test_that_does_not_pass_is_told_from_one_that_does(body, outcome, tmp_path, monkeypatch):
    features = script("features", monkeypatch)
    file = tmp_path / "test_one.py"
    file.write_text(f"import pytest\n\n\ndef test_it():\n    {body}\n")
    assert features.outcome(f"{file}::test_it", full=False) == outcome


@pytest.mark.full
@pytest.mark.parametrize("name", ["inference", "scaling", "time_split"])
def test_with_workers(name, tmp_path, monkeypatch):
    run_here(name, monkeypatch, "--out", tmp_path / f"{name}.json", "--quick")
    found = read_results(tmp_path)
    (made,) = found.values()
    assert not made.missing
    assert results_page(found, figures_of(found))
    if name == "scaling":  # the field's error is that of its bits, whatever K is
        one, two = (made.cells[f"field/inputs={k}"] for k in (1, 2))
        assert one["forward_error"] == two["forward_error"] > made.cells["real/inputs=1"]["forward_error"]
        assert one["sent_bytes"] != two["sent_bytes"]
