"""A job, made of what a client asked for. Everything is looked at before anything is kept of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from darknight.coding.arithmetic import Field, Real
from darknight.coding.scheme import Scheme
from darknight.errors import UsageError
from darknight.models.registry import canonical
from darknight.train import Recipe
from darknight.wire.jobs import JobText

KINDS = ("train", "infer")
PARTS = ("train", "test", "all")
_SCHEME = {"inputs": int, "colluders": int, "spares": int, "mixing": str, "integrity": str}
_MOST_TOP = 1000


@dataclass(frozen=True, kw_only=True)
class Job:
    """recipe: of a training; None for predictions."""

    text: JobText
    scheme: Scheme
    recipe: Recipe | None

    @classmethod
    def of(cls, text: JobText, *, workers: int) -> Job:
        """UsageError, SchemeError or OpError says what is wrong; `workers` is how many this enclave has."""
        _choice("kind", text.kind, KINDS)
        _choice("part", text.part, PARTS)
        _check_model(text)
        scheme = scheme_from_words(text.scheme)
        if text.kind == "infer":
            scheme = scheme.for_inference()
        if scheme.workers > workers:
            raise UsageError(
                f"the scheme needs {scheme.workers} workers; this enclave has {workers}. "
                "Lower inputs, colluders or spares, or submit it elsewhere."
            )
        if not 0 <= text.save_every < math.inf or type(text.top) is not int or not 1 <= text.top <= _MOST_TOP:
            raise UsageError(f"save_every {text.save_every:g}, top {text.top}: at least 0, and 1 to {_MOST_TOP}.")
        if (text.recipe is None) != (text.kind == "infer"):
            raise UsageError("a job to train needs a recipe, and one to infer has none.")
        return cls(text=text, scheme=scheme, recipe=None if text.recipe is None else recipe_from_words(text.recipe))


def scheme_from_words(words: Mapping[str, Any]) -> Scheme:
    """inputs and colluders, and if need be spares, mixing, integrity, noise_std (real arithmetic), or paper = true."""
    if words == {"paper": True}:
        return Scheme.paper()
    known = {**_SCHEME, "noise_std": float}
    for name, value in words.items():
        if name not in known or not isinstance(value, known[name]) or isinstance(value, bool):
            raise UsageError(f"scheme: {name!r} is unknown or of the wrong kind; known are {', '.join(known)}, paper.")
    if not words.keys() >= {"inputs", "colluders"}:
        raise UsageError("scheme: needs inputs and colluders.")
    chosen = {name: value for name, value in words.items() if name in _SCHEME}
    noise = words.get("noise_std")
    return Scheme(**chosen, arithmetic=Field() if noise is None else Real(noise_std=noise))


def recipe_from_words(words: Mapping[str, Any]) -> Recipe:
    """Epochs, batch_size and learning_rate, and whatever else differs from the usual."""
    known = {field.name for field in fields(Recipe)} - {"augment"}
    if odd := sorted(words.keys() - known):
        raise UsageError(f"recipe: unknown {', '.join(odd)}; known are {', '.join(sorted(known))}.")
    if missing := sorted({"epochs", "batch_size", "learning_rate"} - words.keys()):
        raise UsageError(f"recipe: no {', no '.join(missing)}.")
    usual = Recipe(epochs=2**31, batch_size=1, learning_rate=1.0).words()
    return Recipe.from_words({**usual, **words})


def _check_model(text: JobText) -> None:
    """A name of the registry. A description is built, and refused, when the data says what shape it takes."""
    if text.model.keys() == {"name"} and isinstance(text.model["name"], str):
        canonical(text.model["name"])
    elif text.model.keys() != {"layers"} or not isinstance(text.model["layers"], list):
        raise UsageError('model: needs name = "...", or layers = [...]. Code of a client is never run.')
    if text.kind == "infer" and text.weights is None:
        raise UsageError("a job to infer needs weights.")


def _choice(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{what} {value!r}; use one of {', '.join(known)}.")
