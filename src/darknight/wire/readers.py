"""How each end puts frames together again. Nothing here knows of a network: frames go in, messages come out.

Guarantees: the enclave's reader makes room only for tensors that a task of its own is waiting for, in the shapes that
it fixed itself. The worker's reader makes room only after its session agreed. Any frame that is not due is BadFrame.
Contract tests: tests/wire/test_fuzz.py::test_the_enclaves_reader, tests/wire/test_fuzz.py::test_the_workers_reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from darknight.errors import OpError
from darknight.types import Answer, BackwardTask, Expected, ForwardTask, Message, Pass, Reply, TooLarge
from darknight.wire import codec, fields, usual
from darknight.wire.codec import CHUNK, BadFrame, Form, Header
from darknight.wire.link import LinkError
from darknight.wire.seeds import shadow

Place = tuple[int, int]  # segment and offset in shared memory


def empty(form: Form) -> Tensor:
    return torch.empty(form[1], dtype=form[0])


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor: its own memory, if it is contiguous and on the CPU."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


class _Filling:
    """Chunks go one after the other into the given memories, or into nothing (None) if they are not wanted."""

    def __init__(self, parts: list[tuple[int, memoryview | None]]) -> None:
        self._parts = [part for part in parts if part[0] > 0]
        self._done = 0  # bytes of the first part

    @property
    def complete(self) -> bool:
        return not self._parts

    def take(self, frame: bytes) -> None:
        nbytes, memory = self._parts[0]
        due = min(CHUNK, nbytes - self._done)
        if len(frame) != due:
            raise BadFrame(f"a chunk of {len(frame)} bytes where {due} are due")
        if memory is not None:
            memory[self._done : self._done + due] = frame
        self._done += due
        if self._done == nbytes:
            del self._parts[0]
            self._done = 0


# --- the enclave's --------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Question:
    """A task that waits for its answer. collect: fetches it from shared memory; None: it follows in chunks.

    usual: `usual.answer_around` it, if it was made beforehand.
    """

    layer: str
    call: int
    expected: Expected
    future: Future[Answer] = field(default_factory=Future)
    collect: Callable[[], dict[Pass, Tensor]] | None = None
    usual: tuple[bytes, bytes] | None = None


class ReplyReader:
    """Frames of a worker -> replies to the questions that `find` knows."""

    def __init__(self, find: Callable[[int], Question | None], allocate: Callable[[Form], Tensor] = empty) -> None:
        self._find = find
        self._allocate = allocate
        self._filling: _Filling | None = None
        self._ticket = 0
        self._header: Header = {}
        self._tensors: dict[Pass, Tensor] | None = None

    def feed(self, frame: bytes) -> tuple[int, Reply | None] | None:
        """The ticket and the reply that this frame completes: None in place of a reply that nobody wants any more."""
        if self._filling is None:
            if (found := self._usual(frame)) is not None:
                return found
            self._begin(codec.unpack(frame))
        else:
            self._filling.take(frame)
        if self._filling is None or not self._filling.complete:
            return None
        header, tensors = self._header, self._tensors
        self._filling, self._header, self._tensors = None, {}, None
        return self._ticket, None if tensors is None else codec.reply_from(header, tensors)

    def _usual(self, frame: bytes) -> tuple[int, Answer | None] | None:
        """The same, if the frame is to the letter the answer of an honest worker, and in shared memory."""
        ticket = usual.ticket_of(frame)
        if ticket is None:
            return None
        try:
            question = self._find(ticket)
        except LinkError:
            return None
        if question is None or question.collect is None:
            return None
        layer, call, expected = question.layer, question.call, question.expected
        before, after = question.usual or usual.answer_around(layer, call, expected, ticket)
        seconds = usual.seconds_of(frame, before, after)
        if seconds is None:
            return None
        if question.future.cancelled():
            return ticket, None
        return ticket, Answer(layer=layer, call=call, tensors=question.collect(), seconds=seconds)

    def _begin(self, header: Header) -> None:
        self._ticket = fields.number(header.pop("ticket", None))
        question = self._find(self._ticket)
        if question is None:
            raise BadFrame("an answer to a question that was not asked, or was answered before")
        self._header = header
        wanted = not question.future.cancelled()
        if codec.is_refusal(header):
            self._filling, self._tensors = _Filling([]), {}
            return
        forms = codec.check_answer(header)  # in the order in which they come
        if (header["layer"], header["call"]) != (question.layer, question.call):
            raise BadFrame("an answer to another question than the one asked")
        due = _due(question.expected)
        if complaint := _complaint(forms, due):
            raise BadFrame(complaint)
        if question.collect is not None:
            self._filling, self._tensors = _Filling([]), question.collect() if wanted else None
        elif wanted:
            self._tensors = {kind: self._allocate(form) for kind, form in forms.items()}
            self._filling = _Filling([(codec.nbytes_of(forms[kind]), raw(t)) for kind, t in self._tensors.items()])
        else:
            self._tensors = None
            self._filling = _Filling([(codec.nbytes_of(form), None) for form in forms.values()])


def _due(expected: Expected) -> dict[Pass, Form]:
    return {kind: (expected.dtype, shape) for kind, shape in expected.shapes.items()}


def _complaint(found: Mapping[Pass, Form], due: Mapping[Pass, Form]) -> str:
    if found.keys() != due.keys():
        return "an answer to another question than the one asked"
    for kind, (dtype, shape) in due.items():
        if found[kind] != (dtype, shape):
            return f"{kind.value}: an answer of shape {found[kind][1]} and {found[kind][0]}; needs {shape} and {dtype}"
    return ""


# --- the worker's ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Received:
    """What a worker's reader made of a message. answers: where in shared memory the results are due."""

    ticket: int
    message: Message | TooLarge
    answers: Mapping[Pass, Place] | None = None

    @property
    def is_task(self) -> bool:
        if isinstance(self.message, TooLarge):
            return self.message.version is None
        return isinstance(self.message, ForwardTask | BackwardTask)


class MessageReader:
    """Frames of an enclave -> messages. `admit` is asked before room is made and raises OpError if there is none.

    at: a tensor in shared memory; None where there is no shared memory.
    """

    def __init__(
        self,
        admit: Callable[[int], None],
        allocate: Callable[[Form], Tensor] = empty,
        at: Callable[[Place, Form], Tensor] | None = None,
    ) -> None:
        self._admit = admit
        self._allocate = allocate
        self._at = at
        self._ticket = 0
        self._filling: _Filling | None = None
        self._finish: Callable[[], Received] | None = None

    def feed(self, frame: bytes) -> Received | None:
        """The message that this frame completes."""
        if self._filling is None:
            self._begin(codec.unpack(frame))
        else:
            self._filling.take(frame)
        if self._filling is None or not self._filling.complete or self._finish is None:
            return None
        finish = self._finish
        self._filling, self._finish = None, None
        return finish()

    def _begin(self, header: Header) -> None:
        ticket = fields.number(header.pop("ticket", None))
        if ticket <= self._ticket:
            raise BadFrame("a ticket that is not above the one before")
        self._ticket = ticket
        place = _optional_place(header.pop("place", None))
        answers = _optional_places(header.pop("answers", None))
        checked = codec.check_message(header)
        form, seeded = codec.form_of(header), codec.has_seed(header)
        shared = self._at is not None and (place is not None or seeded)
        if (place is not None and (form is None or seeded)) or ((place, answers) != (None, None) and not shared):
            raise BadFrame("a place in shared memory, on a link or for a message that has none")
        if form is None:
            self._filling, self._finish = _Filling([]), lambda: Received(ticket, checked)
            return
        following = codec.nbytes_of(form) if place is None and not seeded else 0
        try:
            tensor = self._tensor(place, form, seeded)
        except (OpError, RuntimeError, MemoryError) as error:  # torch raises RuntimeError when the system has no more
            version = fields.number(header["version"]) if header["kind"] == "weights" else None
            left_out = TooLarge(layer=fields.text(header["layer"]), version=version, reason=str(error))
            self._filling, self._finish = _Filling([(following, None)]), lambda: Received(ticket, left_out)
            return
        self._filling = _Filling([(following, raw(tensor) if following else None)])
        self._finish = lambda: Received(ticket, codec.with_tensor(checked, tensor), answers)

    def _tensor(self, place: Place | None, form: Form, seeded: bool) -> Tensor:
        if place is not None and self._at is not None:
            return self._at(place, form)
        self._admit(codec.nbytes_of(form))
        return shadow(*form) if seeded else self._allocate(form)  # whoever computes makes it from the seed


def _optional_place(value: object) -> Place | None:
    if value is None:
        return None
    pair = fields.a_list(value)
    if len(pair) != 2:
        raise BadFrame("something else where a segment and an offset are due")
    return fields.number(pair[0]), fields.number(pair[1])


def _optional_places(value: object) -> dict[Pass, Place] | None:
    if value is None:
        return None
    places = {}
    for name, pair in fields.an_object(value).items():
        place = _optional_place(pair)
        if place is None:
            raise BadFrame("something else where a segment and an offset are due")
        places[codec.a_pass(name)] = place
    return places
