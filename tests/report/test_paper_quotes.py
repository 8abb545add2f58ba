"""What is quoted has the paper's shape, and every test that our row names is there."""

import ast
import math
from pathlib import Path

import pytest

from darknight.accounting.theorems import theorem_1
from darknight.report.our_features import OURS
from darknight.report.paper_quotes import FEATURES, FIGURE_2, FIGURE_2_PRINTED, TABLE_1, TABLE_2

ROOT = Path(__file__).resolve().parents[2]


def test_table_1_has_a_yes_or_no_for_every_feature():
    assert len(TABLE_1) == 11
    assert len(FEATURES) == 12
    for marks in TABLE_1.values():
        assert len(marks) == len(FEATURES)
        assert set(marks) <= {"y", "n"}
    assert TABLE_1["DarKnight (the paper)"].count("y") == 8


@pytest.mark.parametrize("setting", [name for name in TABLE_2 if name != "clear"])
def test_table_2_prints_twice_its_theorem(setting):
    variance = float(setting.rstrip(")").split(",")[1])
    assert TABLE_2[setting].leakage == pytest.approx(2 * theorem_1(2, 1.0, 10.0, math.sqrt(variance)))


def test_figure_2_is_drawn_as_it_is_printed():
    for model, value in FIGURE_2.items():
        assert float(FIGURE_2_PRINTED[model].removeprefix("more than ")) == value


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    if not (ROOT / file).is_file():
        return False
    functions = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    return name in {function.name for function in functions}


def test_every_feature_of_ours_names_tests_that_exist():
    assert set(OURS) == set(FEATURES)
    for name, feature in OURS.items():
        assert feature.tests, name
        assert feature.mark in ("y", "n", "?")
        for test in feature.tests:
            assert exists(test), test


def test_a_wrong_name_would_be_noticed():
    assert not exists("tests/report/test_paper_quotes.py::test_that_is_not_there")
    assert not exists("tests/report/not_there.py::test_a_wrong_name_would_be_noticed")
    assert exists("tests/report/test_paper_quotes.py::test_a_wrong_name_would_be_noticed")
