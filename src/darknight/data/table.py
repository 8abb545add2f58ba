"""Tables as CSV: a line of column names, then one example a line, numbers and one label.

The label column is the one called label, target, class or y (in any case), or else the last. Labels are whole numbers
or texts, and classes are numbered in their order. Columns are parted by commas, semicolons or tabs, whichever the first
line has most of. Tables are kept in memory, as float64, up to MEMORY_LIMIT.
"""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from darknight.data.files import MEMORY_LIMIT, StillFile, refusing
from darknight.data.found import MOST_CLASSES, Found, Labelled
from darknight.data.source import InMemory
from darknight.errors import DataError

_LABELS = ("label", "target", "class", "y")
_LONGEST_LINE = 1 << 20
_NEEDED = "a table of numbers in CSV, in UTF-8, with a line of column names"


def read_table(path: Path) -> Found:
    file = StillFile(path)
    with file.opened(buffered=True) as raw, refusing(path, _NEEDED, csv.Error, UnicodeDecodeError):
        table, labels = _read(io.TextIOWrapper(raw, encoding="utf-8-sig", newline=""), path)
    names, numbers = _classes(labels, path)
    return Found(
        name=path.name,
        train=Labelled(InMemory(str(path), table), numbers),
        test=None,
        classes=len(names),
        label_names=names,
    )


def _read(text: TextIO, path: Path) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float64]], list[str]]:
    """The numbers, (example, column), and the labels as they are written."""
    lines = _lines(text, path)
    first = next(lines, "")
    rows = csv.reader(chain([first], lines), delimiter=max(",;\t", key=first.count), strict=True)
    names = [name.strip() for name in next(rows, [])]
    label_column = _label_column(names, path)
    values, labels = array("d"), list[str]()
    for row in rows:
        if not row:
            continue  # an empty line
        place = f"{path}, line {rows.line_num}"
        if len(row) != len(names):
            raise DataError(f"{place}: {len(row)} columns; the first line names {len(names)}.")
        label = row.pop(label_column).strip()
        if not label:
            raise DataError(f"{place}: the label is missing. Fill it in, or leave the line out.")
        labels.append(label)
        values.extend(_numbers(row, label_column, place))
        if len(values) * values.itemsize > MEMORY_LIMIT:
            raise DataError(f"{place}: the numbers so far take {MEMORY_LIMIT} bytes, and no more are kept. Use npz.")
    if not labels:
        raise DataError(f"{path}: no line below the column names. Needs at least one example.")
    return np.frombuffer(values, dtype=np.float64).reshape(len(labels), len(names) - 1), labels


def _lines(text: TextIO, path: Path) -> Iterator[str]:
    while line := text.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise DataError(f"{path}: a line of more than {_LONGEST_LINE} characters. Needs {_NEEDED}.")
        yield line


def _label_column(names: list[str], path: Path) -> int:
    """Where the labels are; and a look at the names, because a first line that is data would be lost as an example."""
    if len(names) < 2:
        raise DataError(f"{path}: {len(names)} columns in the first line. Needs {_NEEDED}, and at least two of these.")
    if "" in names:
        raise DataError(
            f"{path}: column {names.index('') + 1} has no name. Name it, or leave it out (pandas: to_csv(index=False))."
        )
    if len(set(names)) != len(names):
        raise DataError(
            f"{path}: some columns have the same name, or the first line is not one of names. Needs {_NEEDED}."
        )
    called = [number for number, name in enumerate(names) if name.lower() in _LABELS]
    if len(called) > 1:
        raise DataError(f"{path}: {len(called)} columns could be the label ({', '.join(_LABELS)}). Rename all but one.")
    label = called[0] if called else len(names) - 1
    numeric = [_is_number(name) for name in names[:label] + names[label + 1 :]]
    if all(numeric) and not called:
        raise DataError(f"{path}: the first line looks like data. Needs {_NEEDED}.")
    return label


def _numbers(row: list[str], label_column: int, place: str) -> list[float]:
    try:
        numbers = [float(cell) for cell in row]
    except ValueError:
        numbers = []
    if len(numbers) == len(row) and all(map(math.isfinite, numbers)):
        return numbers
    bad = next(at for at, cell in enumerate(row) if not (_is_number(cell) and math.isfinite(float(cell))))
    column = bad + 1 + (bad >= label_column)
    raise DataError(f"{place}, column {column}: missing, or not a finite number. Fill it in, or leave the line out.")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _classes(labels: list[str], path: Path) -> tuple[tuple[str, ...], torch.Tensor]:
    """The names of the classes in their order, numbers as numbers and texts as texts, and each example's class."""
    written = sorted(set(labels))
    if all(map(_is_number, written)):
        values = [float(label) for label in written]
        if not all(value.is_integer() for value in values):
            raise DataError(
                f"{path}: labels are numbers with a fraction. Needs classes: whole numbers or names. If the label is "
                f"another column, call it {' or '.join(_LABELS)}."
            )
        meant = {label: str(int(value)) for label, value in zip(written, values, strict=True)}
        names = sorted(set(meant.values()), key=int)
    else:
        meant = {label: label for label in written}
        names = written
    if len(names) > MOST_CLASSES:
        raise DataError(
            f"{path}: {len(names)} classes; at most {MOST_CLASSES} are possible. Is the label a measurement?"
        )
    number = {name: at for at, name in enumerate(names)}
    return tuple(names), torch.tensor([number[meant[label]] for label in labels], dtype=torch.int64)
