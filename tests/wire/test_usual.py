"""Frames that are written and recognised without JSON: the same bytes, and the same verdict, as with it."""

import json
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from darknight.types import Answer, BackwardTask, Expected, Forget, ForwardTask, OpSpec, Pass, Weights
from darknight.wire import codec, usual
from darknight.wire.codec import BadFrame
from darknight.wire.link import Misbehaved
from darknight.wire.readers import Question, ReplyReader

NAMES = st.sampled_from(["net.0", "", 'a"b\\', "é]}", "\n\x00", "層", "x" * 900])
NUMBERS = st.sampled_from([0, 1, 7, 2**31, 2**62])
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
DTYPES = st.sampled_from(list(codec.DTYPES.values()))
PASSES = st.sampled_from(
    [(Pass.FORWARD,), (Pass.GRAD_INPUT, Pass.GRAD_WEIGHT), (Pass.GRAD_WEIGHT, Pass.GRAD_INPUT), ()]
)


# --- written --------------------------------------------------------------------------------------------------------
@settings(max_examples=200, deadline=None)
@given(NAMES, NUMBERS, NUMBERS, SHAPES, DTYPES, st.booleans(), st.booleans())
def test_a_forward_task(layer, call, version, shape, dtype, compute, keep):
    tensor = torch.zeros(shape, dtype=dtype)
    task = ForwardTask(layer=layer, call=call, version=version, tensor=tensor, compute=compute, keep=keep)
    assert usual.task_frame(task) == codec.pack(codec.header_of(task))


@settings(max_examples=200, deadline=None)
@given(NAMES, NUMBERS, SHAPES, SHAPES, DTYPES, PASSES, st.sampled_from([None, (1, 0.5)]))
def test_a_backward_task(layer, call, shape, x_shape, dtype, passes, row):
    tensor = torch.zeros(shape, dtype=dtype)
    task = BackwardTask(layer=layer, call=call, version=3, tensor=tensor, passes=passes, x_shape=x_shape, row=row)
    assert usual.task_frame(task) == codec.pack(codec.header_of(task))


@settings(max_examples=100, deadline=None)
@given(
    NUMBERS, st.sampled_from([None, {}, {Pass.FORWARD: (4, 64)}, {Pass.GRAD_WEIGHT: (1, 0), Pass.GRAD_INPUT: (9, 128)}])
)
def test_tickets_and_places(ticket, answers):
    task = ForwardTask(layer="é]}", call=1, version=0, tensor=torch.zeros(2, 3), compute=True, keep=False)
    header, where = {**codec.header_of(task), "ticket": ticket}, None
    if answers is not None:
        header |= {"place": [3, 192], "answers": {kind.value: list(place) for kind, place in answers.items()}}
        where = usual.places((3, 192), answers)
    assert usual.ticketed(usual.task_frame(task), ticket, where) == codec.pack(header)


@settings(max_examples=200, deadline=None)
@given(
    NAMES, NUMBERS, st.dictionaries(st.sampled_from(list(Pass)), SHAPES), DTYPES, st.floats(0, 1e300), st.integers(0, 9)
)
def test_an_answer(layer, call, shapes, dtype, seconds, ticket):
    tensors = {kind: torch.zeros(shape, dtype=dtype) for kind, shape in shapes.items()}
    answer = Answer(layer=layer, call=call, tensors=tensors, seconds=seconds)
    assert usual.answer_frame(answer, ticket) == codec.pack({**codec.reply_header(answer), "ticket": ticket})


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_an_answer_that_cannot_be_written(seconds):
    answer = Answer(layer="a", call=1, tensors={}, seconds=seconds)
    with pytest.raises(BadFrame):
        codec.pack(codec.reply_header(answer))
    with pytest.raises(BadFrame):
        usual.answer_frame(answer, 1)
    with pytest.raises(BadFrame):
        usual.answer_frame(Answer(layer="a", call=1, tensors={Pass.FORWARD: torch.zeros(2).bool()}, seconds=0.1), 1)


def test_what_has_no_answer():
    forget = Forget(calls=(1, 2), weights=(("é", 1),))
    op = OpSpec("linear", (("mode", "word"), ("padding", (1, 2))))
    weights = Weights(layer="é", version=2, op=op, prime=7, tensor=torch.zeros(2, 3))
    for message in (forget, weights):
        for _ in range(2):
            assert usual.posted_frame(message) == codec.pack(codec.header_of(message))
    header = {**codec.header_of(weights), "ticket": 5, "place": [2, 64]}
    assert usual.ticketed(usual.posted_frame(weights), 5, usual.places((2, 64))) == codec.pack(header)


def test_what_does_not_fit_is_refused_as_ever():
    def task(**other):
        settings = {"layer": "x", "tensor": torch.zeros(2, 3), **other}
        return ForwardTask(call=1, version=0, compute=True, keep=False, **settings)

    for odd in (task(layer="\ud800"), task(tensor=torch.zeros(2, dtype=torch.int16)), task(layer="x" * (1 << 16))):
        with pytest.raises(BadFrame) as found:
            usual.task_frame(odd)
        with pytest.raises(BadFrame) as before:
            codec.pack(codec.header_of(odd))
        assert re.sub("[0-9]+ bytes", "", str(found.value)) == re.sub("[0-9]+ bytes", "", str(before.value))
    long = usual.task_frame(task(layer="x" * (codec.HEADER_LIMIT - 130)))
    usual.ticketed(long, 1, None)  # the control: so much fits
    with pytest.raises(BadFrame, match="at most"):
        usual.ticketed(long, 1, usual.places((1 << 40, 1 << 40), {Pass.FORWARD: (1 << 40, 1 << 40)}))


# --- recognised -----------------------------------------------------------------------------------------------------
EXPECTED = Expected({Pass.GRAD_INPUT: (2, 3), Pass.GRAD_WEIGHT: (4,)}, torch.int32, 97)
FORMS = {"grad_input": {"dtype": "int32", "shape": [2, 3]}, "grad_weight": {"dtype": "int32", "shape": [4]}}
HEADER = {"kind": "answer", "layer": "é.0", "call": 12, "seconds": 0.25, "tensors": FORMS, "ticket": 3}


class Reader:
    """A reader with one open question, of ticket 3."""

    def __init__(self):
        self.question = Question("é.0", 12, EXPECTED)
        self.question.collect = lambda: {k: torch.ones(s, dtype=torch.int32) for k, s in EXPECTED.shapes.items()}
        self.reader = ReplyReader(self.find)
        self.sent = 3

    def find(self, ticket):
        if ticket > self.sent:
            raise Misbehaved("an answer to something that was not sent yet")
        return self.question if ticket == 3 else None

    def verdict(self, frame):
        """What becomes of a frame: the answer in its fields, or what is wrong with it."""
        try:
            ticket, reply = self.reader.feed(frame)
        except (BadFrame, Misbehaved) as error:
            return type(error).__name__, str(error)
        if reply is None:
            return ticket, None
        shapes = {kind: tuple(tensor.shape) for kind, tensor in getattr(reply, "tensors", {}).items()}
        return ticket, getattr(reply, "seconds", reply), shapes


def both(frame, **changes):
    """The verdict, and the one that comes of reading every frame."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in changes.items():
            patched.setattr(Reader, name, value)
        found = Reader().verdict(frame)
        patched.setattr(usual, "ticket_of", lambda _: None)
        return found, Reader().verdict(frame)


def taken(frame):
    return usual.seconds_of(frame, *usual.answer_around("é.0", 12, EXPECTED, 3))


def test_the_frame_of_an_honest_worker_is_not_read_as_json(monkeypatch):
    def refuse(_):
        raise AssertionError

    monkeypatch.setattr(codec, "unpack", refuse)
    for seconds in (0.25, 0.0, 1.5e-05, 12, 3.0, 123456.789, 9e-10):
        assert Reader().verdict(codec.pack({**HEADER, "seconds": seconds}))[:2] == (3, float(seconds))


def test_one_that_nobody_wants_any_more_is_not_collected():
    reader = Reader()
    reader.question.future.cancel()
    reader.question.collect = lambda: pytest.fail("it was collected")
    assert reader.verdict(codec.pack(HEADER)) == (3, None)


TIMES = ["-0.5", "1e999", "NaN", "Infinity", "true", "null", "01.5", "1.", ".5", "+1", "1_0", "1e5", "[1]", "1e-999"]
ODD_SECONDS = [*TIMES, "\u0661", "0x1", "1E-5", "5e-400", '"1"', " 1", "1 ", "", '0.5,"seconds":0.25']


@pytest.mark.parametrize("seconds", ODD_SECONDS)
def test_a_time_of_any_other_form_gets_the_verdict_of_reading(seconds):
    frame = codec.pack(HEADER).replace(b"0.25", seconds.encode())
    found, read = both(frame)
    assert found == read


@pytest.mark.parametrize(
    "change",
    [
        {"call": 11},
        {"layer": "é.1"},
        {"ticket": 2},
        {"ticket": 4},
        {"ticket": -3},
        {"tensors": {**FORMS, "grad_weight": {"dtype": "int32", "shape": [5]}}},
        {"tensors": {**FORMS, "grad_weight": {"dtype": "int64", "shape": [4]}}},
        {"tensors": {"grad_input": FORMS["grad_input"]}},
        {"tensors": {**FORMS, "forward": FORMS["grad_weight"]}},
        {"tensors": {}},
        {"kind": "refusal"},
        {"more": 1},
    ],
    ids=str,
)
def test_another_answer_than_the_due_one_is_refused_in_the_same_words(change):
    found, read = both(codec.pack({**HEADER, **change}))
    assert found == read
    assert found[0] in ("BadFrame", "Misbehaved")


def test_the_same_answer_in_other_letters_is_read():
    spaced = json.dumps(HEADER).encode()
    turned = codec.pack({**HEADER, "tensors": dict(reversed(FORMS.items()))})
    for frame in (spaced, turned, codec.pack(dict(reversed(HEADER.items())))):
        assert taken(frame) is None
        found, read = both(frame)
        assert found == read
        assert found[:2] == (3, 0.25)


def test_an_answer_before_its_question_was_sent_is_refused():
    found, read = both(codec.pack(HEADER), find=lambda self, ticket: self.question if ticket <= 2 else _early())
    assert found == read
    assert found[0] == "Misbehaved"


def _early():
    raise Misbehaved("an answer to something that was not sent yet")


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 200), st.binary(max_size=3), st.integers(0, 4))
@example(0, b"", 200)
@example(46, b"0", 0)
def test_a_changed_frame_gets_the_verdict_of_reading(place, put, cut):
    """Bytes cut out and put in anywhere: what is recognised is what reading accepts, to the same values."""
    frame = codec.pack(HEADER)
    frame = frame[:place] + put + frame[place + cut :]
    found, read = both(frame)
    assert found == read
    if taken(frame) is not None:
        assert found[:2] == (3, taken(frame))
