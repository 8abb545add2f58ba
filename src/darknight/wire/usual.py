"""The frames of which there are thousands in a step, written and recognised without going through JSON.

They are the bytes that `codec` and `fields.pack` would give, put together from parts that stay the same from one call
to the next.

Guarantees: a frame that is written here is the one that `codec` writes. A frame that is recognised here is one that
    `codec` reads, to the same answer; about any other nothing is said, and `codec` judges it as ever. So a worker that
    sends something else than usual gains nothing but that it is read more slowly (contract test:
    tests/wire/test_usual.py).
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from darknight.types import Answer, BackwardTask, Expected, Forget, ForwardTask, Pass, Task, Weights
from darknight.wire import codec
from darknight.wire.fields import HEADER_LIMIT, BadFrame, pack

_NAMES = {kind: kind.value for kind in Pass}  # an enum's value is looked up by two functions
_FLAGS = {False: "false", True: "true"}
_SECONDS = re.compile(
    rb"(?:0|[1-9][0-9]{0,9})(?:\.[0-9]{1,20})?(?:e-[0-9]{1,2})?"
)  # as JSON has it, and never negative
_frames: weakref.WeakKeyDictionary[Weights, bytes] = weakref.WeakKeyDictionary()


# --- what is sent ---------------------------------------------------------------------------------------------------
def task_frame(task: Task) -> bytes:
    """The frame of a task, without its ticket and places."""
    if isinstance(task, BackwardTask) and task.row is not None:
        return pack(codec.header_of(task))
    whose = f'"layer":{_word(task.layer)},"call":{task.call},"version":{task.version}'
    form = _form(task.tensor.dtype, task.tensor.shape)
    if task.seed is not None:
        form = f'{form},"seed":{{"key":"{task.seed.key.hex()}","prime":{task.seed.prime}}}'
    if isinstance(task, ForwardTask):
        flags = f'"compute":{_FLAGS[task.compute]},"keep":{_FLAGS[task.keep]}'
        return _within(f'{{"kind":"forward",{whose},{flags},{form}}}'.encode())
    passes = f'"passes":{_passes(task.passes)},"x_shape":{_numbers(task.x_shape)},"row":null'
    return _within(f'{{"kind":"backward",{whose},{passes},{form}}}'.encode())


def posted_frame(message: Weights | Forget) -> bytes:
    """The frame of what has no answer. The same message goes to many workers."""
    if isinstance(message, Forget):
        return _forget_frame(message)
    frame = _frames.get(message)
    if frame is None:
        frame = _frames[message] = pack(codec.header_of(message))
    return frame


def places(share: Sequence[int] | None, answers: Mapping[Pass, Sequence[int]] | None = None) -> bytes:
    """The part of a frame that says where its tensor is in shared memory, and for a task where its answers are due.

    They begin with the number of a segment and an offset. share: None of a task with a seed.
    """
    place = "" if share is None else f'"place":[{share[0]},{share[1]}]'
    if answers is None:
        return place.encode()
    due = ",".join([f'"{_NAMES[kind]}":[{begin[0]},{begin[1]}]' for kind, begin in answers.items()])
    return f'{place}{"," if place else ""}"answers":{{{due}}}'.encode()


def ticketed(frame: bytes, ticket: int, where: bytes | None) -> bytes:
    """The frame with its ticket and, in shared memory, its `places`."""
    if where is None:
        return _within(b'%b,"ticket":%d}' % (frame[:-1], ticket))
    return _within(b'%b,"ticket":%d,%b}' % (frame[:-1], ticket, where))


def answer_frame(answer: Answer, ticket: int) -> bytes:
    """The frame of an answer, with its ticket. The worker writes it, and `seconds_of` recognises it."""
    if not math.isfinite(answer.seconds):
        raise BadFrame("a time that is not finite")
    forms = [f'"{_NAMES[kind]}":{{{_form(each.dtype, each.shape)}}}' for kind, each in answer.tensors.items()]
    whose = f'"layer":{_word(answer.layer)},"call":{answer.call},"seconds":{float.__repr__(answer.seconds)}'
    return _within(f'{{"kind":"answer",{whose},"tensors":{{{",".join(forms)}}},"ticket":{ticket}}}'.encode())


# --- what comes back ------------------------------------------------------------------------------------------------
def ticket_of(frame: bytes) -> int | None:
    """The ticket, if this is the usual answer to anything; `seconds_of` says whether it is."""
    end = frame[frame.rfind(b":") + 1 : -1]
    return int(end) if end.isdigit() and len(end) < 19 else None


def answer_around(layer: str, call: int, expected: Expected, ticket: int) -> tuple[bytes, bytes]:
    """The usual answer to this: what is before and after the time that the worker says it took."""
    before = f'{{"kind":"answer","layer":{_word(layer)},"call":{call},"seconds":'.encode()
    forms = [f'"{_NAMES[kind]}":{{{_form(expected.dtype, shape)}}}' for kind, shape in expected.shapes.items()]
    return before, f',"tensors":{{{",".join(forms)}}},"ticket":{ticket}}}'.encode()


def seconds_of(frame: bytes, before: bytes, after: bytes) -> float | None:
    """That time, if the frame is the usual answer; None: `codec` must look at it."""
    if len(frame) <= len(before) + len(after) or not frame.startswith(before) or not frame.endswith(after):
        return None
    found = frame[len(before) : -len(after)]
    return float(found) if _SECONDS.fullmatch(found) else None


# --- parts ----------------------------------------------------------------------------------------------------------
def _within(frame: bytes) -> bytes:
    if len(frame) > HEADER_LIMIT:
        raise BadFrame(f"a header of {len(frame)} bytes; at most {HEADER_LIMIT} are allowed")
    return frame


@lru_cache(maxsize=4096)
def _word(text: str) -> str:
    return pack({"": text})[len('{"":') : -1].decode()


@lru_cache(maxsize=4096)
def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return pack(codec.form_header(dtype, shape))[1:-1].decode()


@lru_cache(maxsize=4096)
def _numbers(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


@lru_cache(maxsize=64)
def _passes(kinds: tuple[Pass, ...]) -> str:
    return pack({"": [kind.value for kind in kinds]})[len('{"":') : -1].decode()


@lru_cache(maxsize=16)
def _forget_frame(message: Forget) -> bytes:
    return pack(codec.header_of(message))
