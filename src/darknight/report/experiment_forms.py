"""What the cells of each experiment look like, and a check that looks at every value of one.

A form is a type; a list of one form; a dictionary of forms, all of them needed; `Maybe(form)`, which allows null;
`Number(least, most)`, whole numbers too and never NaN or infinite; `Whole(least, most)`; or `NAME`, words that may
stand in a figure. Limits are far beyond what an experiment gives, and within what can be drawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Form = Any


@dataclass(frozen=True)
class Maybe:
    """null, or `form`."""

    form: Form


@dataclass(frozen=True)
class Number:
    least: float
    most: float


@dataclass(frozen=True)
class Whole:
    least: int
    most: int


class _Name:
    """Letters, digits and what stands in N(0, 4e8): nothing that a drawing would take for a formula."""


NAME = _Name()
_NAME = re.compile(r"[A-Za-z0-9 .,()=+/_-]{1,80}")


class MalformedError(Exception):
    """A value is not of its form. The text says where, and not what it is."""


def checked(value: object, form: Form, where: str) -> None:
    """Raises MalformedError if `value` is not of the form."""
    if isinstance(form, Maybe):
        if value is not None:
            checked(value, form.form, where)
    elif isinstance(form, dict):
        if not isinstance(value, dict):
            raise MalformedError(f"{where} is no object")
        if odd := sorted(value.keys() ^ form.keys()):
            raise MalformedError(f"{where}: entries that are missing or unknown: {', '.join(odd)}")
        for name, each in form.items():
            checked(value[name], each, f"{where}.{name}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise MalformedError(f"{where} is no list")
        for number, entry in enumerate(value):
            checked(entry, form[0], f"{where}[{number}]")
    elif isinstance(form, Number):
        if isinstance(value, bool) or not isinstance(value, int | float) or not form.least <= value <= form.most:
            raise MalformedError(f"{where} is no number from {form.least:g} to {form.most:g}")
    elif isinstance(form, Whole):
        if isinstance(value, bool) or not isinstance(value, int) or not form.least <= value <= form.most:
            raise MalformedError(f"{where} is no whole number from {form.least} to {form.most}")
    elif isinstance(form, _Name):
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise MalformedError(f"{where} is no name")
    elif not isinstance(value, form) or (isinstance(value, bool) and form is not bool):
        raise MalformedError(f"{where} is not of the kind {form.__name__}")


_COUNT, _SEED, _BYTES = Whole(1, 10**7), Whole(0, 2**63 - 1), Whole(0, 2**62)
_SHARE, _TIMES = Number(0.0, 1.0), Number(0.0, 1e9)
_NOISE: Form = Maybe({"mean": Number(-1e12, 1e12), "variance": Number(0.0, 1e24)})
_EPOCH: Form = {"loss": Number(-1e9, 1e9), "accuracy": _SHARE}
_ARITHMETIC = {"clear": str, "field": str, "real": str}

SCALES: Mapping[str, Form] = {
    "accuracy": {
        "data": str,
        "train_examples": _COUNT,
        "test_examples": _COUNT,
        "image": [_COUNT],
        "classes": _COUNT,
        "epochs": _COUNT,
        "batch_size": _COUNT,
        "learning_rate": _TIMES,
        "schedule": str,
        "seed": _SEED,
        "schemes": _ARITHMETIC,
    },
    "inference": {
        "data": str,
        "train_examples": _COUNT,
        "test_examples": _COUNT,
        "image": [_COUNT],
        "classes": _COUNT,
        "epochs": _COUNT,
        "batch_size": _COUNT,
        "seed": _SEED,
        "schemes": _ARITHMETIC,
    },
    "time-split": {"size": _COUNT, "times": _COUNT, "scheme": str, "links": str, "place": str},
    "features": {"full": bool},
    "scaling": {
        "model": NAME,
        "image": [_COUNT],
        "batch_size": _COUNT,
        "rounds": _COUNT,
        "seed": _SEED,
        "noise_std": _TIMES,
    },
}

CELLS: Mapping[str, Form] = {
    "accuracy": {
        "model": NAME,
        "setting": NAME,
        "noise": _NOISE,
        "mmacs": _TIMES,
        "epochs": [_EPOCH],
        "stopped": Maybe(str),
        "seconds": _TIMES,
    },
    "inference": {
        "model": NAME,
        "setting": NAME,
        "noise": _NOISE,
        "top1": _SHARE,
        "top5": _SHARE,
        "agreement": _SHARE,
        "leakage": Maybe({"theorem": _TIMES, "dense": _TIMES, "systematic": _TIMES}),
        "stopped": Maybe(str),
    },
    "time-split": {
        "model": NAME,
        "batch": _COUNT,
        "plain": {"linear": _SHARE, "non_linear": _SHARE},
        "enclave": {"masking": _TIMES, "checking": _TIMES, "links": _TIMES, "staying": _TIMES, "optimizer": _TIMES},
        "workers": _TIMES,
        "wall": _TIMES,
        "ceiling": _TIMES,
        "masked_layers": _COUNT,
        "phases": [{"name": str, "share": _SHARE}],
    },
    "features": {"feature": str, "tests": [str], "outcomes": [str]},
    "scaling": {
        "sweep": NAME,
        "arithmetic": NAME,
        "inputs": _COUNT,
        "colluders": _COUNT,
        "workers": _COUNT,
        "batch": _COUNT,
        "virtual_batches": _COUNT,
        "enclave": _TIMES,
        "all_workers": _TIMES,
        "sent_bytes": _BYTES,
        "received_bytes": _BYTES,
        "input_bytes": _BYTES,
        "forward_error": _TIMES,
        "gradient_error": _TIMES,
    },
}
