"""Measurements over time: a file with a JSON object a line, and whether the newest is worse than the one before.

Only lines of the same machine are compared, and of them only ratios that were measured in the same way (model, batch,
size). Several processes may append at once. A line that was torn off, by a full disk or a crash, is skipped, and the
next one begins on a line of its own.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from darknight.errors import DarKnightError

TOLERANCE = 0.10  # beyond which worse is a regression
_SMALLER_IS_BETTER = ("overhead.", "kernels.", "memory.")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One run. ratios: by their path in the JSON of `darknight bench`, such as ceiling.shm.train.vgg16.

    conditions: by the same paths, how it was measured, in words.
    """

    date: str
    machine: Mapping[str, Any]
    program: Mapping[str, Any]
    ratios: Mapping[str, float]
    conditions: Mapping[str, str]

    def words(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "date": self.date,
            "machine": dict(self.machine),
            "program": dict(self.program),
            "ratios": dict(self.ratios),
            "conditions": dict(self.conditions),
        }


@dataclass(frozen=True, kw_only=True)
class Change:
    """A ratio, and what it was: in the last run of this machine that measured it so, and in the best."""

    path: str
    now: float
    last: float | None
    best: float | None

    @property
    def worse(self) -> float | None:
        """By which part of the last one; below zero if it is better."""
        if self.last is None:
            return None
        return self.now / self.last - 1 if smaller_is_better(self.path) else 1 - self.now / self.last

    @property
    def regressed(self) -> bool:
        return self.worse is not None and self.worse > TOLERANCE


def smaller_is_better(path: str) -> bool:
    return path.startswith(_SMALLER_IS_BETTER)


def new_line(
    ratios: Mapping[str, float],
    conditions: Mapping[str, str],
    *,
    machine: Mapping[str, Any],
    program: Mapping[str, Any],
) -> Line:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Line(date=date, machine=machine, program=program, ratios=ratios, conditions=conditions)


def append(path: Path, line: Line) -> list[Line]:
    """Writes the line at the end of the file, whole, and returns those that were there before."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the descriptor is closed
            before = _content(descriptor)
            torn = bool(before) and not before.endswith(b"\n")
            text = json.dumps(line.words(), allow_nan=False, sort_keys=True).encode()
            _write(descriptor, (b"\n" if torn else b"") + text + b"\n", len(before))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DarKnightError(f"cannot write {path}: {error.strerror}. Choose another --history.") from error
    return lines_of(before)


def changes(line: Line, before: Sequence[Line]) -> list[Change]:
    """Each ratio of the line, beside those of earlier lines."""
    found = []
    for path, now in line.ratios.items():
        known = [
            each.ratios[path]
            for each in before
            if path in each.ratios
            and each.machine == line.machine
            and each.conditions.get(path) == line.conditions.get(path)
        ]
        best = (min if smaller_is_better(path) else max)(known, default=None)
        found.append(Change(path=path, now=now, last=known[-1] if known else None, best=best))
    return found


def _content(descriptor: int) -> bytes:
    parts, offset = [], 0
    while part := os.pread(descriptor, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _write(descriptor: int, content: bytes, size: int) -> None:
    """All of it or, where the disk is full, nothing: what was begun is cut off again."""
    try:
        while content:
            content = content[os.write(descriptor, content) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def lines_of(content: bytes) -> list[Line]:
    """The lines that are whole."""
    return [line for text in content.split(b"\n") if (line := _line(text)) is not None]


def _line(text: bytes) -> Line | None:
    """None for what is no line of ours, or only a part of one."""
    try:
        found = json.loads(text)
        line = Line(**{name: found[name] for name in ("date", "machine", "program", "ratios", "conditions")})
        usable = all(isinstance(part, dict) for part in (line.machine, line.program, line.ratios, line.conditions))
        return line if usable and all(map(_is_ratio, line.ratios.values())) else None
    except (ValueError, TypeError, KeyError):
        return None


def _is_ratio(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
