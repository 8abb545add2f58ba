"""One checkpoint: a folder with model.safetensors, optimizer.safetensors and state.json. Nothing in it is pickled.

state.json has {"format", "sha256", "state"}: the digest is of the state, which has the digests of the two others. So a
file that was damaged, or taken from another checkpoint, is noticed. A folder appears complete or not at all: see
darknight.train.store.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from darknight.errors import DarKnightError, DataError
from darknight.train.card import Card
from darknight.train.history import Best, Epoch
from darknight.train.recipe import Recipe
from darknight.train.tensor_file import (
    FORMAT,
    check_format,
    dump_json,
    load_json,
    read_tensors,
    tensors_as_bytes,
    tensors_from_bytes,
    write_tensors,
)

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_LARGEST_STATE = 64 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """Everything that a training needs to go on as if it had never stopped.

    step: how many are done. epochs: those that are complete, with their evaluation. loss_sum and seconds: of the epoch
    that is not. runtime: what Runtime.state_dict() gave; None for a model in the clear. finished: nothing is left to
    do. extra: whatever else the caller wants to find again, plain values.
    """

    card: Card
    recipe: Recipe
    step: int
    epochs: tuple[Epoch, ...]
    loss_sum: float
    seconds: float
    best: Best | None
    runtime: Mapping[str, Any] | None
    finished: bool
    extra: Mapping[str, Any]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the three files into a folder that exists, and wait until they are on the disk."""
    digests = {
        name: write_tensors(folder / name, tensors, words) for name, (tensors, words) in _tensors_of(checkpoint).items()
    }
    write_json(folder / STATE, _state_of(checkpoint, digests))


def checkpoint_as_bytes(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The three files, by name, for whoever may not write them as they are."""
    files, digests = {}, {}
    for name, (tensors, words) in _tensors_of(checkpoint).items():
        files[name], digests[name] = tensors_as_bytes(tensors, words)
    files[STATE] = dump_json(_state_of(checkpoint, digests)).encode()
    return files


def checkpoint_from_bytes(files: Mapping[str, bytes], place: Path) -> Checkpoint:
    """What `checkpoint_as_bytes` gave; `place` is where it came from, for errors."""
    if missing := {MODEL, OPTIMIZER, STATE} - files.keys():
        raise DataError(f"{place}: damaged, it lacks {', '.join(sorted(missing))}.")
    state = load_json(files[STATE], place)
    read = {name: tensors_from_bytes(files[name], place) for name in (MODEL, OPTIMIZER)}
    return _checkpoint_of(state, read, place)


def _tensors_of(checkpoint: Checkpoint) -> dict[str, tuple[Mapping[str, Tensor], dict[str, Any]]]:
    return {
        MODEL: (checkpoint.model, {"card": checkpoint.card.words(), "step": checkpoint.step}),
        OPTIMIZER: (checkpoint.optimizer, {"step": checkpoint.step}),
    }


def _state_of(checkpoint: Checkpoint, digests: Mapping[str, str]) -> dict[str, Any]:
    return {
        "card": checkpoint.card.words(),
        "recipe": checkpoint.recipe.words(),
        "step": checkpoint.step,
        "epochs": [asdict(epoch) for epoch in checkpoint.epochs],
        "loss_sum": checkpoint.loss_sum,
        "seconds": checkpoint.seconds,
        "best": checkpoint.best and asdict(checkpoint.best),
        "runtime": checkpoint.runtime,
        "finished": checkpoint.finished,
        "extra": checkpoint.extra,
        "files": dict(digests),
    }


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint, after a look at everything in it: DataError or UsageError, with the name of the file."""
    state = read_json(folder / STATE)
    return _checkpoint_of(state, {name: read_tensors(folder / name) for name in (MODEL, OPTIMIZER)}, folder / STATE)


def _checkpoint_of(
    state: Mapping[str, Any], read: Mapping[str, tuple[dict[str, Tensor], dict[str, Any], str]], path: Path
) -> Checkpoint:
    try:
        card = Card.from_words(state["card"], path)
        recipe = Recipe.from_words(_mapping(state["recipe"]))
        epochs = tuple(Epoch(**epoch) for epoch in state["epochs"])
        best = None if state["best"] is None else Best(**state["best"])
        files = _mapping(state["files"])
        _check_numbers(state, recipe, epochs, best, card)
        runtime = None if state["runtime"] is None else _mapping(state["runtime"])
        extra = _mapping(state["extra"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        why = f" ({error})" if isinstance(error, DarKnightError) else ""
        raise DataError(f"{path}: its contents make no sense{why}. Take an earlier one.") from error
    for name, (_, words, digest) in read.items():
        if digest != files.get(name) or words.get("step") != state["step"]:
            raise DataError(f"{path.parent / name}: from another checkpoint than {path}. Take another one.")
    return Checkpoint(
        card=card,
        recipe=recipe,
        step=state["step"],
        epochs=epochs,
        loss_sum=state["loss_sum"],
        seconds=state["seconds"],
        best=best,
        runtime=runtime,
        finished=state["finished"],
        extra=extra,
        model=read[MODEL][0],
        optimizer=read[OPTIMIZER][0],
    )


def check_tensors(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights of another model before any is copied."""
    wanted = model.state_dict()
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        where = "lacks" if odd[0] in wanted else "has"
        raise DataError(f"{path}: weights of another model: it {where} {odd[0]!r}. Take one of this model.")
    for name, tensor in wanted.items():
        if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
            raise DataError(
                f"{path}: {name} is {tensors[name].dtype} of shape {tuple(tensors[name].shape)}; the model needs "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}."
            )


def write_json(path: Path, state: Mapping[str, Any]) -> None:
    """{"format", "sha256", "state"}, for people too."""
    whole = f'{{"format": {FORMAT}, "sha256": "{_digest(state)}", "state":\n{dump_json(state)}}}\n'
    with path.open("wb") as file:
        file.write(whole.encode())
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_STATE:
            raise DataError(f"{path}: larger than any state. Take another one.")
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file. Give a folder that `darknight train` wrote.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    words = load_json(text, path)
    check_format(words, path)
    state = words.get("state")
    if not isinstance(state, dict) or _digest(state) != words.get("sha256"):
        raise DataError(f"{path}: damaged, its contents do not fit its digest. Take an earlier one.")
    return state


def _digest(state: Mapping[str, Any]) -> str | None:
    try:
        return hashlib.sha256(dump_json(state).encode()).hexdigest()
    except ValueError:  # NaN, which we never write
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return value


def _check_numbers(
    state: Mapping[str, Any], recipe: Recipe, epochs: tuple[Epoch, ...], best: Best | None, card: Card
) -> None:
    """TypeError if they cannot be those of one training."""
    per_epoch = math.ceil(card.train_examples / recipe.batch_size)
    step, done = state["step"], len(epochs)
    floats = (state["loss_sum"], state["seconds"], *(value for epoch in epochs for value in astuple(epoch)[1:]))
    fits = (
        type(step) is int
        and done * per_epoch <= step <= min(done + 1, recipe.epochs) * per_epoch
        and [epoch.number for epoch in epochs] == list(range(1, done + 1))
        and all(type(value) in (int, float) and math.isfinite(value) for value in floats)
        and type(state["finished"]) is bool
        and (best is None) == (done == 0)
        and (best is None or (best.epoch in range(1, done + 1) and best.accuracy == epochs[best.epoch - 1].accuracy))
    )
    if not fits:
        raise TypeError
