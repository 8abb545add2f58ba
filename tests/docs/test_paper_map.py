"""docs/paper_map.md covers the paper, and everything it names exists."""

import ast
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/paper_map.md").read_text().splitlines()
    if line.startswith("| ") and "`tests/" in line
]
WANTED = {
    *(f"Eq. {number}" for number in range(1, 7)),
    "integrity",
    "Thm 1",
    "Thm 2",
    "Lemma 1",
    "Lemma 2",
    *(f"display {number}" for number in range(7, 27)),
}


def labels(cell: str) -> set[str]:
    ranged = re.fullmatch(r"displays (\d+)-(\d+)", cell)
    if ranged is None:
        return {cell}
    return {f"display {number}" for number in range(int(ranged[1]), int(ranged[2]) + 1)}


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_equation_theorem_and_display_has_a_row():
    assert set().union(*(labels(row[0]) for row in ROWS)) == WANTED


def test_every_function_exists():
    for row in ROWS:
        module, name = row[2].strip("`").rsplit(".", 1)
        assert callable(getattr(import_module(module), name)), row[0]


def test_every_test_exists():
    for row in ROWS:
        file, name = row[3].strip("`").split("::")
        assert name in functions_of(ROOT / file), row[0]


def test_a_wrong_name_would_be_noticed():
    assert "test_that_is_not_there" not in functions_of(ROOT / "tests/coding/test_code.py")
    assert not hasattr(import_module("darknight.coding.field"), "not_there")
