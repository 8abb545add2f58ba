"""What the cells of each experiment look like, and a check that looks at every value of one.

A form is a type; a list of one form; a dictionary of forms, all of them needed; or `Maybe(form)`, which allows null.
float takes whole numbers too; no number may be NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Form = Any


@dataclass(frozen=True)
class Maybe:
    """null, or `form`."""

    form: Form


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
    elif form is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise MalformedError(f"{where} is no number")
    elif not isinstance(value, form) or (isinstance(value, bool) and form is not bool):
        raise MalformedError(f"{where} is not of the kind {form.__name__}")


_NOISE: Form = Maybe({"mean": float, "variance": float})
_EPOCH: Form = {"loss": float, "accuracy": float}
_ARITHMETIC = {"clear": str, "field": str, "real": str}

SCALES: Mapping[str, Form] = {
    "accuracy": {
        "data": str,
        "train_examples": int,
        "test_examples": int,
        "image": [int],
        "classes": int,
        "epochs": int,
        "batch_size": int,
        "learning_rate": float,
        "schedule": str,
        "seed": int,
        "schemes": _ARITHMETIC,
    },
    "inference": {
        "data": str,
        "train_examples": int,
        "test_examples": int,
        "image": [int],
        "classes": int,
        "epochs": int,
        "batch_size": int,
        "seed": int,
        "schemes": _ARITHMETIC,
    },
    "time-split": {"size": int, "times": int, "scheme": str, "links": str, "place": str},
    "features": {"full": bool},
    "scaling": {"model": str, "image": [int], "batch_size": int, "rounds": int, "seed": int, "noise_std": float},
}

CELLS: Mapping[str, Form] = {
    "accuracy": {
        "model": str,
        "setting": str,
        "noise": _NOISE,
        "mmacs": float,
        "epochs": [_EPOCH],
        "stopped": Maybe(str),
        "seconds": float,
    },
    "inference": {
        "model": str,
        "setting": str,
        "noise": _NOISE,
        "top1": float,
        "top5": float,
        "agreement": float,
        "leakage": Maybe({"theorem": float, "dense": float, "systematic": float}),
        "stopped": Maybe(str),
    },
    "time-split": {
        "model": str,
        "batch": int,
        "plain": {"linear": float, "non_linear": float},
        "enclave": {"masking": float, "checking": float, "links": float, "staying": float, "optimizer": float},
        "workers": float,
        "wall": float,
        "ceiling": float,
        "masked_layers": int,
        "phases": [{"name": str, "share": float}],
    },
    "features": {"feature": str, "tests": [str], "outcomes": [str]},
    "scaling": {
        "sweep": str,
        "arithmetic": str,
        "inputs": int,
        "colluders": int,
        "workers": int,
        "batch": int,
        "virtual_batches": int,
        "enclave": float,
        "all_workers": float,
        "sent_bytes": int,
        "received_bytes": int,
        "input_bytes": int,
        "forward_error": float,
        "gradient_error": float,
    },
}
