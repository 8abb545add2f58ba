"""A file that describes a model, for --model: the layers of darknight.models.described, as TOML or JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from darknight.errors import UsageError

_FORMATS = {".toml": tomllib.loads, ".json": json.loads}
_LARGEST = 1 << 20


def read_description(model: str) -> dict[str, Any] | None:
    """What the file says, not looked at yet; None if `model` is no name of such a file."""
    path = Path(model)
    if (read := _FORMATS.get(path.suffix.lower())) is None:
        return None
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(f"--model {path}: cannot be read ({error.strerror}).") from error
    if len(text) > _LARGEST:
        raise UsageError(f"--model {path}: larger than {_LARGEST} bytes, which no description is.")
    try:
        found = read(text.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--model {path}: not a {path.suffix[1:].upper()} file. Correct it.") from error
    if not isinstance(found, dict):
        raise UsageError(f"--model {path}: not an object with a list of layers.")
    return found
