"""What a hostile worker can tell as its own: its earlier answers, weights of earlier versions, others' answers."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from collections.abc import Hashable
from pathlib import Path

import torch
from torch import Tensor

from darknight.types import Weights
from darknight.wire.tampering import different

_FILES = 64  # answers of its own that a worker leaves in a meeting place
_meetings = itertools.count()


class Answers:
    """For each key, the latest true answers under two different numbers."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, dict[int, Tensor]] = {}

    def keep(self, key: Hashable, number: int, tensor: Tensor) -> None:
        kept = self._kept.setdefault(key, {})
        kept.pop(number, None)
        kept[number] = tensor
        if len(kept) > 2:
            del kept[next(iter(kept))]

    def other(self, key: Hashable, number: int) -> Tensor | None:
        """The latest one under another number."""
        found = [tensor for known, tensor in self._kept.get(key, {}).items() if known != number]
        return found[-1] if found else None


class OldWeights:
    """The weights of each layer that came first, and the latest ones: copies, as the originals may be shared memory."""

    def __init__(self) -> None:
        self._first: dict[Hashable, Tensor] = {}
        self._latest: dict[Hashable, dict[int, Tensor]] = {}

    def first(self, weights: Weights) -> Tensor | None:
        """The first ones of the same layer and form that ever came; None if these are the same."""
        key = _form(weights)
        if key not in self._first:
            self._first[key] = _copy(weights.tensor)
        return different(weights.tensor, self._first[key])

    def before(self, weights: Weights, back: int) -> Tensor | None:
        """Those of `back` versions ago, of the same layer and form; None if there are none, or these are the same."""
        kept = self._latest.setdefault((*_form(weights), back), {})
        kept.pop(weights.version, None)
        kept[weights.version] = _copy(weights.tensor)
        if len(kept) > back + 1:
            del kept[next(iter(kept))]
        return different(weights.tensor, next(iter(kept.values()))) if len(kept) > back else None


def _form(weights: Weights) -> tuple[Hashable, ...]:
    return weights.layer, tuple(weights.tensor.shape), weights.tensor.dtype, weights.prime


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class Meeting:
    """A folder where hostile workers exchange answers: a line of JSON about the tensor, and its bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._who = f"{os.getpid()}-{next(_meetings)}-{time.monotonic_ns()}"
        self._own: deque[Path] = deque()

    def put(self, subject: str, tensor: Tensor) -> None:
        path = self._folder / f"{subject}.{self._who}"
        hidden = path.with_name(f".{path.name}")
        hidden.write_bytes(_header(tensor) + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        hidden.replace(path)  # whole or not at all
        self._own.append(path)
        if len(self._own) > _FILES:
            self._own.popleft().unlink(missing_ok=True)

    def take(self, subject: str, like: Tensor, seconds: float) -> Tensor | None:
        """Another worker's answer of the same form, if one comes in time."""
        deadline = time.monotonic() + seconds
        while True:
            for path in sorted(self._folder.glob(f"{subject}.*")):
                if not path.name.endswith(f".{self._who}") and (found := _tensor_in(path, like)) is not None:
                    return found
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.005)  # nobody tells when somebody comes

    def leave(self) -> None:
        while self._own:
            self._own.popleft().unlink(missing_ok=True)


def _header(tensor: Tensor) -> bytes:
    return json.dumps({"dtype": str(tensor.dtype), "shape": list(tensor.shape)}).encode() + b"\n"


def _tensor_in(path: Path, like: Tensor) -> Tensor | None:
    try:
        content = path.read_bytes()
    except OSError:  # its owner has left
        return None
    header = _header(like)
    if not content.startswith(header) or len(content) != len(header) + like.nbytes or not like.numel():
        return None
    return torch.frombuffer(bytearray(content[len(header) :]), dtype=like.dtype).reshape(like.shape)
