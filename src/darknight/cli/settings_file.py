"""darknight.toml: one table for each command, [train] or [fleet.check], with its options as keys."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from darknight.errors import UsageError


class Kind(StrEnum):
    """What an option may be set to, in the words of an error."""

    FLAG = "true or false"
    VALUE = "a number or a text"
    TEXTS = "a text, or a list of texts"

    def takes(self, value: object) -> bool:
        if self is Kind.TEXTS:
            return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))
        return isinstance(value, str | int | float) and isinstance(value, bool) == (self is Kind.FLAG)


Known = Mapping[str, "Kind | Known"]  # options as they are written after the two dashes; commands have tables of them


def read_settings_file(path: str, known: Known, command: str | None) -> dict[str, dict[str, Any]]:
    """Defaults for `command`, by parameter name, as its context wants them. A file that is absent sets nothing.

    Tables of other commands must exist, but what is in them is their own concern: it cannot keep this one from running.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Make it readable or remove it.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file ({error}). Correct or remove it.") from error
    _refuse_unknown(path, "table", tables, known)
    return (
        {}
        if command is None
        else _settings(path, "", {name: tables[name] for name in tables if name == command}, known)
    )


def _settings(path: str, within: str, table: Mapping[str, Any], known: Known) -> dict[str, Any]:
    _refuse_unknown(path, f"key in [{within}]", table, known)
    found: dict[str, Any] = {}
    for key, value in table.items():
        kind = known[key]
        if not isinstance(kind, Kind):
            name = f"{within}.{key}".removeprefix(".")
            if not isinstance(value, dict):
                raise UsageError(f"{path}: {name} is a single value; needs a table, [{name}].")
            found[key] = _settings(path, name, value, kind)
        elif kind.takes(value):
            found[key.replace("-", "_")] = [value] if kind is Kind.TEXTS and isinstance(value, str) else value
        else:
            raise UsageError(f"{path}: {key} in [{within}] is {type(value).__name__}; needs {kind.value}.")
    return found


def _refuse_unknown(path: str, what: str, found: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = sorted(found.keys() - known.keys())
    if unknown:
        raise UsageError(f"{path}: unknown {what}: {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
