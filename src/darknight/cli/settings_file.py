"""darknight.toml: one table for each command, with its options as keys."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from darknight.errors import UsageError


def read_settings_file(path: str, options: dict[str, dict[str, bool]]) -> dict[str, dict[str, Any]]:
    """Defaults for each command, by parameter name. A file that is absent sets nothing.

    options: for each command, its options as they are written after the two dashes, and whether each is a flag.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Make it readable or remove it.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file ({error}). Correct or remove it.") from error
    _refuse_unknown(path, "table", tables, options)
    settings: dict[str, dict[str, Any]] = {}
    for command, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {command} is a single value; needs a table, [{command}].")
        _refuse_unknown(path, f"key in [{command}]", table, options[command])
        for key, value in table.items():
            is_flag = options[command][key]
            if isinstance(value, bool) != is_flag or not isinstance(value, str | int | float):
                needed = "true or false" if is_flag else "a number or a text"
                raise UsageError(f"{path}: {key} in [{command}] is {type(value).__name__}; needs {needed}.")
        settings[command] = {key.replace("-", "_"): value for key, value in table.items()}
    return settings


def _refuse_unknown(path: str, what: str, found: dict[str, Any], known: dict[str, Any]) -> None:
    unknown = sorted(found.keys() - known.keys())
    if unknown:
        raise UsageError(f"{path}: unknown {what}: {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
