"""The file of an experiment comes back as it was, and nothing else is taken for one."""

import json

import pytest

from darknight.errors import DarKnightError, DataError
from darknight.report.experiment_file import experiment_from, read_experiment, write_experiment
from report.measurements import changed, everything, leaves

NAMES = list(everything())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(name, tmp_path):
    made, path = everything()[name], tmp_path / "deeper" / "a.json"
    write_experiment(path, made)
    assert read_experiment(path) == made
    assert [each.name for each in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_another_kind_is_refused_wherever_it_is(name, tmp_path):
    """Each place of the first two cells and of everything around them, with something that no place takes."""
    made = everything()[name]
    words = made.words()
    words["planned"] = words["planned"][:2]
    words["cells"] = {cell: words["cells"][cell] for cell in words["planned"] if cell in words["cells"]}
    assert experiment_from(words, tmp_path).cells
    for path in leaves(words):
        with pytest.raises(DataError):
            experiment_from(changed(words, path, [[None]]), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_that_is_missing_or_too_much_is_refused(name, tmp_path):
    words = everything()[name].words()
    for key in words:
        with pytest.raises(DataError):
            experiment_from({other: words[other] for other in words if other != key}, tmp_path)
    with pytest.raises(DataError, match="unknown: more"):
        experiment_from({**words, "more": 1}, tmp_path)
    cell = next(iter(words["cells"]))
    with pytest.raises(DataError, match="unknown: more"):
        experiment_from(changed(words, ("cells", cell, "more"), 1), tmp_path)
    with pytest.raises(DataError, match="was not planned"):
        experiment_from(changed(words, ("planned",), [each for each in words["planned"] if each != cell]), tmp_path)


TEXT = json.dumps(everything()["scaling"].words())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (TEXT[: len(TEXT) // 2], "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (TEXT.replace("9.0", "NaN"), "not JSON (NaN is no number)"),
        (TEXT.replace("9.0", "1e999"), "all_workers is no number from 0 to 1e+09"),
        ('{"ratios": {}}', "not a file of an experiment"),
        ("[1, 2]", "not a file of an experiment"),
        (TEXT.replace('"version": 1,', '"version": 2,'), "version 2 of the format"),
        (TEXT.replace('"experiment": "scaling"', '"experiment": "other"'), "an experiment of another name"),
        (TEXT.replace('"cores": 2', '"cores": true'), "machine.cores"),
    ],
)
def test_files_that_are_something_else_are_refused_in_words(text, complaint, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError) as refused:
        read_experiment(path)
    assert complaint in str(refused.value)
    assert str(path) in str(refused.value)


def test_bytes_that_are_no_text_and_files_that_are_none(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "a.json", tmp_path / "absent.json", tmp_path):
        with pytest.raises(DataError):
            read_experiment(path)


def test_what_could_not_be_read_is_not_written_and_what_was_there_stays(tmp_path):
    path, good = tmp_path / "a.json", everything()["features"]
    write_experiment(path, good)
    broken = everything()["features"]
    next(iter(broken.cells.values()))["outcomes"] = "passed"
    with pytest.raises(DataError):
        write_experiment(path, broken)
    assert read_experiment(path) == good
    with pytest.raises(DarKnightError, match="cannot write"):
        write_experiment(path / "below.json", good)
