"""Tables in CSV."""

import numpy as np
import pytest
import torch

from darknight.data import files, read_dataset, table
from darknight.errors import DataError
from data import makers


@pytest.fixture
def write(tmp_path):
    def written(*lines, name="set.csv", encoding="utf-8"):
        (tmp_path / name).write_bytes("\n".join(lines).encode(encoding))
        return str(tmp_path / name)

    return written


def test_columns_are_standardised_by_the_training_rows(tmp_path):
    made = makers.table(tmp_path / "set", rows=60)
    data, train, test = makers.read_all(made.source, test_share=0.25)
    assert (data.name, data.shape, data.classes) == ("set.csv", (3,), 3)
    assert data.label_names == ("blue", "green", "red")
    rows = made.train_x[data.train.chosen.numpy()]
    for found, part in ((train, data.train), (test, data.test)):
        expected = (made.train_x[part.chosen.numpy()] - rows.mean(axis=0)) / rows.std(axis=0)
        assert torch.allclose(found, torch.from_numpy(expected).float(), atol=1e-5)
    written = [makers.COLOURS[made.train_y[at]] for at in data.test.chosen]
    assert [data.label_names[label] for label in data.test.labels] == written


@pytest.mark.parametrize("head", ["a,b,label", "label,a,b", "a,Target,b", "a,CLASS,b", "y,a,b", "a,b,colour", "0,1,y"])
def test_the_label_column_is_found(write, head):
    at = next((n for n, name in enumerate(head.split(",")) if name.lower() in ("label", "target", "class", "y")), 2)
    rows = [["1.5", "-2e3"], ["3", "4"], ["5", "6"], ["7", "8"]]
    for number, row in enumerate(rows):
        row.insert(at, str(number % 2))
    data = read_dataset(write(head, *map(",".join, rows)), seed=0, test_share=0.5)
    assert data.shape == (2,)
    assert sorted(data.train.labels.tolist()) == [0, 1]
    assert np.sort(data.train.source.array[:, 0]).tolist() == [1.5, 3, 5, 7]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_quotes_and_empty_lines(write, delimiter):
    lines = [line.replace("|", delimiter) for line in ("a|b|label", '"1"|2|"x ""y"""', "", "3|4|z", "")]
    data = read_dataset(write(*lines), seed=0, test_share=0.5)
    assert data.label_names == ('x "y"', "z")


def test_a_mark_of_byte_order_and_windows_lines_are_no_obstacle(tmp_path):
    (tmp_path / "set.csv").write_bytes("\ufeffy,a\r\n1,2\r\n0,3\r\n".encode())
    assert read_dataset(str(tmp_path / "set.csv"), seed=0, test_share=0.5).label_names == ("0", "1")


@pytest.mark.parametrize(
    ("labels", "names"),
    [(["10", "9", "2"], ("2", "9", "10")), (["1.0", "1", "0"], ("0", "1")), (["-1", "1"], ("-1", "1")),
     (["b", "10", "a"], ("10", "a", "b"))],
)  # fmt: skip
def test_classes_are_numbered_in_the_order_of_their_labels(write, labels, names):
    data = read_dataset(write("a,y", *(f"{n},{label}" for n, label in enumerate(labels))), seed=0, test_share=0.4)
    assert data.label_names == names


@pytest.mark.parametrize("cell", ["", " ", "NA", "nan", "inf", "-Infinity", "1,5", "?"])
def test_a_missing_value_is_refused_with_its_line_and_not_shown(write, cell):
    path = write("a,label,b", "1,x,2", "", f'3,x,"{cell}"')
    with pytest.raises(DataError, match=r"set.csv, line 4, column 3: missing, or not a finite number"):
        read_dataset(path, seed=0)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "0 columns"),
        (["a,y"], "no line below"),
        (["a,y", "1,2,3"], "line 2: 3 columns; the first line names 2"),
        (["a,y", "1"], "line 2: 1 columns"),
        (["a,y", "1,"], "line 2: the label is missing"),
        (["a,y", "1,0.5", "2,1"], "numbers with a fraction"),
        (["a", "1"], "1 columns"),
        (["5.1,3.5,setosa", "4,3,virginica"], "looks like data"),
        (["1,2,3", "1,2,3"], "looks like data"),
        (["a,a,y", "1,2,3"], "same name"),
        ([",a,y", "1,2,3"], r"column 1 has no name.*index=False"),
        (["y,label,a", "1,2,3"], "2 columns could be the label"),
        (["a,y", '"1,2'], "set.csv: "),
        (["a,y", f"{'1' * 200_000},2"], "set.csv: "),
    ],
)
def test_tables_that_are_none_are_refused(write, lines, complaint):
    with pytest.raises(DataError, match=complaint):
        read_dataset(write(*lines), seed=0)


def test_a_file_in_another_encoding_is_refused(write):
    with pytest.raises(DataError, match=r"set.csv: .* in UTF-8"):
        read_dataset(write("größe,y", "1,2", encoding="latin-1"), seed=0)


def test_endless_lines_and_tables_are_refused(write, monkeypatch):
    monkeypatch.setattr(table, "_LONGEST_LINE", 50)
    with pytest.raises(DataError, match="a line of more than 50 characters"):
        read_dataset(write("a,y", "1" * 60), seed=0)
    monkeypatch.setattr(table, "MEMORY_LIMIT", 16)
    with pytest.raises(DataError, match="line 4: the numbers so far take 16 bytes"):
        read_dataset(write("a,y", "1,1", "2,1", "3,1"), seed=0)
    assert files.MEMORY_LIMIT > 1 << 30
