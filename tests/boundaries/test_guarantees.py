"""Every docstring that says "Guarantees:" names a test that holds it to that, and the test exists."""

import ast
import re
from collections.abc import Iterator

import pytest

from boundaries.house import ROOT, Source, sources

SECTION = re.compile(r"^ *Guarantees:.*?(?=^ *(?:Assumes|Leaks):|^ *$|\Z)", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"\btests/[\w./]*\w(?:::\w+)*")


def docstrings(source: Source) -> Iterator[tuple[str, str]]:
    """(where, text): of the module, its classes and its functions."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{source.module}:{getattr(node, 'name', '')}".rstrip(":"), text


def names_in(path: str) -> set[str]:
    """The names of the tests in a file, those of a class as Class::test."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    homes = [("", tree.body), *((f"{node.name}::", node.body) for node in classes)]
    return {
        f"{prefix}{node.name}"
        for prefix, body in homes
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def offences(source: Source) -> list[str]:
    found = []
    for where, text in docstrings(source):
        for promise in SECTION.findall(text):
            files = [name.partition("::")[0] for name in NAMED.findall(promise)]
            if not any(file.endswith(".py") and (ROOT / file).is_file() and names_in(file) for file in files):
                found.append(
                    f"{where}: guarantees something, and names no test of it. Add (contract test: tests/...py)."
                )
        for file, _, test in (name.partition("::") for name in NAMED.findall(text)):
            if not (ROOT / file).exists():
                found.append(f"{where}: there is no {file}. Was it renamed?")
            elif test and test not in names_in(file):
                found.append(f"{where}: there is no {test} in {file}. Was it renamed?")
    return found


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.module)
def test_every_guarantee_names_a_test_that_exists(source):
    assert not offences(source), "\n".join(offences(source))


def test_there_are_guarantees_to_check():
    """In each room that promises something to a user, and in all."""
    rooms = [source.room for source in sources() for _, text in docstrings(source) if SECTION.search(text)]
    assert len(rooms) >= 45
    promising = ("coding", "accounting", "integrity", "randomness", "fleet", "runtime", "nn", "train", "wire", "worker")
    assert {*promising, "trust"} <= set(rooms)


HOLDS = "tests/boundaries/test_guarantees.py"


# The checker can fail: each of these breaks one rule.
@pytest.mark.parametrize(
    ("docstring", "complaint"),
    [
        ("A room.\n\nGuarantees: all is well.", "names no test"),
        ("A room.\n\nGuarantees: all is well (contract tests: the usual ones).", "names no test"),
        ("A room.\n\nGuarantees: all is well (tests/boundaries).", "names no test"),
        (f"Guarantees: all is well.\nAssumes: that it is ({HOLDS}).", "names no test"),
        (f"Guarantees: all is well.\n\nMore in {HOLDS}.", "names no test"),
        ("Guarantees: all is well (tests/boundaries/house.py).", "names no test"),
        (
            f"Guarantees: all is well ({HOLDS}, tests/boundaries/test_nothing.py).",
            "no tests/boundaries/test_nothing.py",
        ),
        (f"Guarantees: all is well ({HOLDS}::test_that_is_not_there).", "no test_that_is_not_there"),
        (f"Guarantees: all is well ({HOLDS}::names_in).", "no names_in"),
        (
            "No promise, but a test that went away: tests/boundaries/test_nothing.py.",
            "no tests/boundaries/test_nothing.py",
        ),
    ],
)
@pytest.mark.parametrize("where", ["module", "class", "method"])
def test_an_offence_is_found(docstring, complaint, where):
    indented = docstring.replace("\n", "\n    ")
    text = {
        "module": f'"""{docstring}\n"""\n',
        "class": f'class Room:\n    """{indented}\n    """\n',
        "method": f'class Room:\n    async def enter(self):\n        """{indented}\n        """\n',
    }[where]
    (found,) = offences(Source("darknight.coding.room", text))
    assert complaint in found
    assert found.startswith("darknight.coding.room")


@pytest.mark.parametrize(
    "docstring",
    [
        "No promise.",
        f"Guarantees: all is well ({HOLDS}).",
        f"Guarantees: all is well (contract tests: {HOLDS}::test_an_offence_is_found, tests/docs/test_readme.py).",
        "Guarantees: all is well (tests/coding/test_privacy_statistics.py::TestABrokenFieldSchemeIsRejected::"
        "test_d_equal_to_zero).",
    ],
)
def test_these_are_none(docstring):
    assert not offences(Source("darknight.coding.room", f'"""{docstring}"""\n'))
