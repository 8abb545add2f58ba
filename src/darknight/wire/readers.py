"""How each end puts frames together again. Nothing here knows of a network: frames go in, messages come out.

Guarantees: the enclave's reader makes room only for tensors that a task of its own is waiting for, in the shapes that
it fixed itself. The worker's reader makes room only after its session agreed. Any frame that is not due is BadFrame.
Contract tests: tests/wire/test_fuzz.py::test_the_enclaves_reader, tests/wire/test_fuzz.py::test_the_workers_reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        self._offered: memoryview | None = None

    @property
    def complete(self) -> bool:
        return not self._parts

    def place(self) -> memoryview | None:
        """Where the next chunk goes: who writes it there himself gives this to `take`. None if it is not wanted."""
        nbytes, memory = self._parts[0]
        self._offered = None if memory is None else memory[self._done : min(self._done + CHUNK, nbytes)]
        return self._offered

    def take(self, frame: bytes | memoryview) -> None:
        nbytes, memory = self._parts[0]
        due = min(CHUNK, nbytes - self._done)
        if len(frame) != due:
            raise BadFrame(f"a chunk of {len(frame)} bytes where {due} are due")
        if memory is not None and frame is not self._offered:
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

    def seconds_of(self, frame: bytes, ticket: int) -> float | None:
        """What the worker says it took, if the frame is to the letter the answer of an honest one to this question."""
        around = self.usual or usual.answer_around(self.layer, self.call, self.expected, ticket)
        return usual.seconds_of(frame, *around)


class ReplyReader:
    """Frames of a worker -> replies to the questions that `find` knows."""

    def __init__(self, find: Callable[[int], Question | None], allocate: Callable[[Form], Tensor] = empty) -> None:
        self._find = find
        self._allocate = allocate
        self._filling: _Filling | None = None
        self._ticket = 0
        self._reply: Reply | None = None

    def place(self) -> memoryview | None:
        """Where the next frame may be written before it is fed, if it is a chunk that is wanted."""
        return None if self._filling is None else self._filling.place()

    def feed(self, frame: bytes | memoryview) -> tuple[int, Reply | None] | None:
        """The ticket and the reply that this frame completes: None in place of a reply that nobody wants any more.

        Nothing of the frame is kept.
        """
        if self._filling is None:
            words = bytes(frame)
            if not self._usual(words):
                self._begin(codec.unpack(words))
        else:
            self._filling.take(frame)
        if self._filling is None or not self._filling.complete:
            return None
        reply, self._filling, self._reply = self._reply, None, None
        return self._ticket, reply

    def _usual(self, frame: bytes) -> bool:
        """Begins an answer whose header is to the letter that of an honest worker; False of any other."""
        ticket = usual.ticket_of(frame)
        if ticket is None:
            return False
        try:
            question = self._find(ticket)
        except LinkError:
            return False
        if question is None:
            return False
        seconds = question.seconds_of(frame, ticket)
        if seconds is None:
            return False
        self._ticket = ticket
        tensors, layer, call = self._tensors(question), question.layer, question.call
        self._reply = None if tensors is None else Answer(layer=layer, call=call, tensors=tensors, seconds=seconds)
        return True

    def _begin(self, header: Header) -> None:
        self._ticket = fields.number(header.pop("ticket", None))
        question = self._find(self._ticket)
        if question is None:
            raise BadFrame("an answer to a question that was not asked, or was answered before")
        if codec.is_refusal(header):
            self._filling, self._reply = _Filling([]), codec.reply_from(header, {})
            return
        forms = codec.check_answer(header)  # in the order in which they come
        if (header["layer"], header["call"]) != (question.layer, question.call):
            raise BadFrame("an answer to another question than the one asked")
        due = _due(question.expected)
        if complaint := _complaint(forms, due):
            raise BadFrame(complaint)
        tensors = self._tensors(question, list(forms))
        self._reply = None if tensors is None else codec.reply_from(header, tensors)

    def _tensors(self, question: Question, order: Sequence[Pass] = ()) -> dict[Pass, Tensor] | None:
        """Those of the answer, which are there or will be filled; None if nobody wants them any more.

        order: in which they come, if not in that of the question.
        """
        due, wanted = _due(question.expected), not question.future.cancelled()
        if question.collect is not None:
            self._filling = _Filling([])
            return question.collect() if wanted else None
        if not wanted:
            self._filling = _Filling([(codec.nbytes_of(due[kind]), None) for kind in order or due])
            return None
        tensors = {kind: self._allocate(due[kind]) for kind in order or due}
        self._filling = _Filling([(codec.nbytes_of(due[kind]), raw(tensor)) for kind, tensor in tensors.items()])
        return tensors


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

    def place(self) -> memoryview | None:
        """Where the next frame may be written before it is fed, if it is a chunk that is wanted."""
        return None if self._filling is None else self._filling.place()

    def feed(self, frame: bytes | memoryview) -> Received | None:
        """The message that this frame completes. Nothing of the frame is kept."""
        if self._filling is None:
            self._begin(codec.unpack(bytes(frame)))
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
