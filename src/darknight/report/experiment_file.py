"""The file of an experiment: what was measured, at which scale, on what, by which command. JSON, with a version.

    {"format": "darknight.experiment", "version": 1, "experiment": "accuracy", "command": "python experiments/...",
     "scale": {...}, "machine": {...}, "program": {...}, "planned": ["vgg-small/clear", ...],
     "cells": {"vgg-small/clear": {...}}}

A cell is one measurement, written as soon as it is complete; `planned` names all of them. A file that is anything else
is refused as a whole: half a figure would be read as a figure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from darknight.errors import DarKnightError, DataError
from darknight.report.experiment_forms import CELLS, NAME, SCALES, MalformedError, Whole, checked

FORMAT, VERSION = "darknight.experiment", 1
_WORDS = {"processor": str, "cores": Whole(1, 10**6), "memory_gib": Whole(0, 10**6), "system": str, "large_pages": str}
_KEYS = {"format", "version", "experiment", "command", "scale", "machine", "program", "planned", "cells"}
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """name: one of `CELLS`. scale: how much was measured. cells: by their names, those that are complete."""

    name: str
    command: str
    scale: Mapping[str, Any]
    machine: Mapping[str, Any]
    program: Mapping[str, Any]
    planned: tuple[str, ...]
    cells: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.planned if name not in self.cells)

    def words(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "experiment": self.name,
            "command": self.command,
            "scale": dict(self.scale),
            "machine": dict(self.machine),
            "program": dict(self.program),
            "planned": list(self.planned),
            "cells": {name: dict(self.cells[name]) for name in self.planned if name in self.cells},
        }


def write_experiment(path: Path, experiment: Experiment) -> None:
    """Under another name first, and on the disk before it gets its own: a kill leaves the file as it was."""
    words = experiment.words()
    experiment_from(words, path)  # what could not be read again is not written
    text = json.dumps(words, indent=1, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DarKnightError(f"cannot write {path}: {error.strerror}. Choose another --out, or make room.") from error


def read_experiment(path: Path) -> Experiment:
    """The experiment in a file; DataError, with the place, for anything else."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path}: larger than {_MOST_BYTES >> 20} MiB; no experiment writes so much. Take it out.")
        words = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({_first_line(error)}). Run the experiment again, or take it out.") from None
    return experiment_from(words, path)


def experiment_from(words: object, path: Path) -> Experiment:
    """The experiment that `words` describe, looked at to the last number. path: for the error."""
    if not isinstance(words, dict) or words.get("format") != FORMAT:
        raise DataError(f"{path}: not a file of an experiment of DarKnight. Give a folder of such alone.")
    if words.get("version") != VERSION:
        raise DataError(
            f"{path}: version {words.get('version')!r} of the format; this program reads {VERSION}. Use the program "
            "that wrote it, or run the experiment again."
        )
    name = words.get("experiment")
    if not isinstance(name, str) or name not in CELLS:
        raise DataError(f"{path}: an experiment of another name; known are {', '.join(CELLS)}.")
    try:
        _check(words, name)
    except MalformedError as error:
        raise DataError(f"{path}: {error}. It was changed or cut; run the experiment again.") from None
    return Experiment(
        name=name,
        command=words["command"],
        scale=words["scale"],
        machine=words["machine"],
        program=words["program"],
        planned=tuple(words["planned"]),
        cells=words["cells"],
    )


def _check(words: Mapping[str, Any], name: str) -> None:
    if odd := sorted(words.keys() ^ _KEYS):
        raise MalformedError(f"entries that are missing or unknown: {', '.join(odd)}")
    checked(words["command"], str, "command")
    machine = words["machine"]  # files of before do not say which pages it had
    checked({"large_pages": "", **machine} if isinstance(machine, dict) else machine, _WORDS, "machine")
    checked(words["planned"], [NAME], "planned")
    checked(words["scale"], SCALES[name], "scale")
    for what in ("program", "cells"):
        if not isinstance(words[what], dict):
            raise MalformedError(f"{what} is no object")
    for what, value in words["program"].items():
        if not isinstance(value, str | bool | None):
            raise MalformedError(f"program.{what} is neither words nor true, false or null")
    if strange := sorted(set(words["cells"]) - set(words["planned"])):
        raise MalformedError(f"cell {strange[0]} was not planned")
    for cell, found in words["cells"].items():
        checked(found, CELLS[name], f"cells.{cell}")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
