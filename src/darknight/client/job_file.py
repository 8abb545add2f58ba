"""The job file: what to do with which sealed data, and whom to trust with it.

::

    kind = "train"                    # or "infer"
    output = "result"                 # folder for the result; until then for the job's key and receipts
    policy = "policy.toml"            # what the enclave must be: darknight.trust.policy
    save_every = 60.0                 # optional: seconds between two checkpoints
    leakage_budget = 1.0              # optional, for real arithmetic

    [data]
    sealed = "digits.sealed"          # folder that `darknight seal` made
    key = "digits.sealed.key"
    part = "test"                     # for infer: train, test or all; of data without labels, test is all of it

    [model]
    name = "small-cnn"                # or layers = [...], a description
    weights = "start.safetensors"     # to begin with; to infer with. A file that `darknight train` or a job wrote

    [recipe]                          # for train: the settings of `darknight train`
    epochs = 8
    batch_size = 64
    learning_rate = 0.05
    augment = true                    # optional: crop and flip, as is usual for the data

    [scheme]
    inputs = 4
    colluders = 1

Paths are relative to the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darknight.errors import UsageError

_LARGEST = 1 << 20
_TOP = {"kind", "output", "policy", "save_every", "leakage_budget", "top", "data", "model", "recipe", "scheme"}
_DATA = {"sealed", "key", "part"}
_MODEL = {"name", "layers", "weights"}


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A job file without mistakes of form; the enclave looks at the meaning."""

    path: Path
    kind: str
    output: Path
    policy: Path
    sealed: Path
    key: Path
    part: str
    model: Mapping[str, Any]
    weights: Path | None
    recipe: Mapping[str, Any] | None
    augment: bool
    scheme: Mapping[str, Any]
    save_every: float
    leakage_budget: float | None
    top: int


def read_job_file(path: Path) -> JobFile:
    """What the file says. Every mistake raises UsageError, which names the file and the remedy."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST + 1)
        words = tomllib.loads(raw.decode())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give the path of a job file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not a TOML file ({error}). Correct it.") from error
    try:
        return _job_file(path, words)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _job_file(path: Path, words: dict[str, Any]) -> JobFile:
    _known("the file", words, _TOP)
    data, model, scheme = (_table(words, name) for name in ("data", "model", "scheme"))
    _known("[data]", data, _DATA)
    _known("[model]", model, _MODEL)
    recipe = dict(_table(words, "recipe")) if "recipe" in words else None
    augment = recipe.pop("augment", False) if recipe is not None else False
    if not isinstance(augment, bool):
        raise UsageError("[recipe]: augment needs true or false.")
    weights = _text("[model]", model, "weights") if "weights" in model else None
    kind = _text("the file", words, "kind")
    return JobFile(
        path=path,
        kind=kind,
        output=path.parent / _text("the file", words, "output"),
        policy=path.parent / _text("the file", words, "policy"),
        sealed=path.parent / _text("[data]", data, "sealed"),
        key=path.parent / _text("[data]", data, "key"),
        part=_text("[data]", data, "part") if "part" in data else "test",
        model=_model(model, kind),
        weights=None if weights is None else path.parent / weights,
        recipe=recipe,
        augment=augment,
        scheme=_numbers(scheme),
        save_every=_float(words, "save_every", 60.0),
        leakage_budget=_float(words, "leakage_budget", None),
        top=words.get("top", 5),
    )


def _model(table: dict[str, Any], kind: str) -> dict[str, Any]:
    """What goes to the enclave. For predictions the weights say themselves what model they are of."""
    chosen: dict[str, Any] = {name: table[name] for name in ("name", "layers") if name in table}
    if kind == "infer" and not chosen:
        return {"name": "mlp"}
    if len(chosen) != 1:
        raise UsageError('[model]: needs either name = "..." or layers = [...].')
    return chosen


def _numbers(table: dict[str, Any]) -> dict[str, Any]:
    noise = table.get("noise_std")
    return table if not isinstance(noise, int) else {**table, "noise_std": float(noise)}


def _float(words: dict[str, Any], name: str, otherwise: Any) -> Any:
    value = words.get(name, otherwise)
    if value is not otherwise and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UsageError(f"{name} needs a number.")
    return float(value) if isinstance(value, int | float) else value


def _table(words: dict[str, Any], name: str) -> dict[str, Any]:
    value = words.get(name)
    if not isinstance(value, dict):
        raise UsageError(f"no table [{name}]. Add one.")
    return value


def _text(where: str, table: dict[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f'{where} has no {key}. Write {key} = "...".')
    return value


def _known(where: str, table: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(table.keys() - known):
        raise UsageError(f"{where} has an unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
