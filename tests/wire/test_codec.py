"""Messages as bytes and back: equal after the trip, and nothing else gets through."""

import contextlib
import json
import math
import time
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from darknight.types import Answer, BackwardTask, Forget, ForwardTask, OpSpec, Pass, Refusal, Weights
from darknight.wire import codec
from darknight.wire.codec import BadFrame

NUMBERS = st.integers(0, 2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=60)
SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)
DTYPES = st.sampled_from(list(codec.DTYPES.values()))
TENSORS = st.builds(lambda shape, dtype: torch.zeros(shape, dtype=dtype), SHAPES, DTYPES)
SETTINGS = st.lists(st.tuples(NAMES, NAMES | st.lists(st.integers(-9, 9), max_size=6).map(tuple)), max_size=4).map(
    tuple
)
OPS = st.builds(OpSpec, NAMES, SETTINGS)
PASSES = st.lists(st.sampled_from(list(Pass)), unique=True).map(tuple)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.none() | st.lists(FINITE | st.integers(0, 2**28), max_size=6).map(tuple)
MESSAGES = st.one_of(
    st.builds(Weights, layer=NAMES, version=NUMBERS, op=OPS, prime=st.none() | st.just(2**28 - 57), tensor=TENSORS),
    st.builds(
        ForwardTask,
        layer=NAMES,
        call=NUMBERS,
        version=NUMBERS,
        tensor=TENSORS,
        compute=st.booleans(),
        keep=st.booleans(),
    ),
    st.builds(
        BackwardTask,
        layer=NAMES,
        call=NUMBERS,
        version=NUMBERS,
        tensor=TENSORS,
        passes=PASSES,
        x_shape=SHAPES,
        row=ROWS,
    ),
    st.builds(
        Forget,
        calls=st.lists(NUMBERS, max_size=9).map(tuple),
        weights=st.lists(st.tuples(NAMES, NUMBERS), max_size=4).map(tuple),
        everything=st.booleans(),
    ),
)


def fields_of(record):
    return {name: value for name, value in vars(record).items() if name != "tensor"}


@given(MESSAGES)
@settings(max_examples=150, deadline=None)
def test_a_message_comes_back_equal(message):
    header = codec.unpack(codec.pack(codec.header_of(message)))
    codec.check_message(header)
    tensor = getattr(message, "tensor", None)
    back = codec.message_from(header, tensor)
    assert type(back) is type(message)
    assert fields_of(back) == fields_of(message)
    if tensor is None:
        assert codec.form_of(header) is None
    else:
        assert codec.form_of(header) == (tensor.dtype, tuple(tensor.shape))
        assert back.tensor is tensor


@given(NAMES, NUMBERS, st.dictionaries(st.sampled_from(list(Pass)), TENSORS), st.floats(0, 1e9))
@settings(max_examples=100, deadline=None)
def test_an_answer_comes_back_equal(layer, call, tensors, seconds):
    answer = Answer(layer=layer, call=call, tensors=tensors, seconds=seconds)
    header = codec.unpack(codec.pack(codec.reply_header(answer)))
    codec.check_answer(header)
    assert list(codec.reply_forms(header)) == list(tensors)  # the order of the chunks
    back = codec.reply_from(header, tensors)
    assert (back.layer, back.call, back.seconds) == (layer, call, seconds)


def test_a_row_of_coefficients_keeps_every_bit():
    row = (0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**28 - 58)
    task = BackwardTask(layer="a", call=0, version=0, tensor=torch.zeros(1), passes=(), x_shape=(), row=row)
    back = codec.message_from(codec.unpack(codec.pack(codec.header_of(task))), task.tensor)
    assert [(type(value), value, math.copysign(1, value)) for value in back.row] == [
        (type(value), value, math.copysign(1, value)) for value in row
    ]


def test_a_refusal_is_cut_and_printable():
    back = codec.reply_from(codec.unpack(codec.pack(codec.reply_header(Refusal(message="\x1b[2J" + "x" * 5000)))), {})
    assert back.message == " [2J" + "x" * 996
    surrogate = codec.reply_header(Refusal(message="\ud800"))
    assert codec.reply_from(codec.unpack(codec.pack(surrogate)), {}).message == "?"


FORWARD = codec.header_of(ForwardTask(layer="a", call=1, version=2, tensor=torch.zeros(2, 3), compute=True, keep=False))
BACKWARD = codec.header_of(
    BackwardTask(layer="a", call=1, version=2, tensor=torch.zeros(2), passes=(Pass.FORWARD,), x_shape=(1,), row=(0.5,))
)
WEIGHTS = codec.header_of(
    Weights(layer="a", version=2, op=OpSpec("conv", (("stride", (1, 1)),)), prime=97, tensor=torch.zeros(2))
)
FORGET = codec.header_of(Forget(calls=(1,), weights=(("a", 1),)))
CHANGES = [
    (FORWARD, "kind", ["run", None, 1, ["forward"], "answer"]),
    (FORWARD, "layer", [1, None, "x" * 1001, ["a"], "\ud800"]),
    (FORWARD, "call", [-1, 2**63, 1.0, "1", True, None, 10**400]),
    (FORWARD, "version", [-1, 2**63, 1.5, False]),
    (FORWARD, "compute", [1, 0, "true", None]),
    (FORWARD, "keep", [1, None]),
    (FORWARD, "dtype", ["float16", "complex64", "torch.float32", 1, None, ["float32"]]),
    (FORWARD, "shape", [None, 6, "23", [-1], [2.0], [True], [2**40], [1] * 9, [2**30, 2**18], [0, 2**39, 2**39]]),
    (BACKWARD, "passes", [None, "forward", ["forward", "forward"], ["eval"], [1], [[]], [{}]]),
    (BACKWARD, "x_shape", [None, [-1], [2**40]]),
    (BACKWARD, "row", [0.5, "1", [None], ["1"], [True], [2**64]]),
    (WEIGHTS, "prime", [0, 1, -7, 2.0, "97", 2**31, True]),
    (
        WEIGHTS,
        "op",
        [
            None,
            "conv",
            {"name": "conv"},
            {"name": 1, "settings": []},
            {"name": "conv", "settings": {}, "code": ""},
            {"name": "conv", "settings": [["stride"]]},
            {"name": "conv", "settings": [["stride", 1]]},
            {"name": "conv", "settings": [["stride", [1.5]]]},
            {"name": "conv", "settings": [["stride", [[1]]]]},
            {"name": "conv", "settings": [["stride", [1] * 17]]},
            {"name": "conv", "settings": [["stride", [2**31]]]},
            {"name": "x" * 101, "settings": []},
        ],
    ),
    (FORGET, "calls", [None, 1, [-1], ["1"], [None], [1.0]]),
    (FORGET, "weights", [[["a"]], [["a", 1, 2]], [[1, "a"]], ["ab"], {"a": 1}]),
    (FORGET, "everything", [None, 1, "yes"]),
]


@pytest.mark.parametrize(
    ("header", "key", "value"),
    [(header, key, value) for header, key, values in CHANGES for value in values],
)
def test_a_field_of_another_type_or_range_is_refused(header, key, value):
    codec.check_message(dict(header))  # the control: as it is, it is well
    with pytest.raises(BadFrame):
        codec.check_message({**header, key: value})


@pytest.mark.parametrize("header", [FORWARD, BACKWARD, WEIGHTS, FORGET], ids=lambda header: header["kind"])
def test_every_key_is_needed_and_no_other_is_taken(header):
    for key in header:
        with pytest.raises(BadFrame):
            codec.check_message({k: v for k, v in header.items() if k != key})
    with pytest.raises(BadFrame):
        codec.check_message({**header, "extra": None})


ANSWER = codec.reply_header(Answer(layer="a", call=1, tensors={Pass.FORWARD: torch.zeros(2)}, seconds=0.5))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("seconds", value) for value in (-0.1, "1", None, True, 10**400)),
        *(("tensors", value) for value in (None, [], {"eval": {}}, {"forward": None}, {"forward": {"dtype": "int32"}})),
        ("call", -1),
        ("layer", 7),
    ],
)
def test_a_field_of_an_answer_too(key, value):
    codec.check_answer(dict(ANSWER))
    with pytest.raises(BadFrame):
        codec.check_answer({**ANSWER, key: value})


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":1}}',
        b'{"a":' + b"[" * 9 + b"]" * 9 + b"}",
        b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":1}' + b" " * codec.HEADER_LIMIT,
        b"\x80\x04\x95.",  # a pickle
    ],
)
def test_a_frame_that_is_no_header_is_refused_and_not_repeated(frame):
    with pytest.raises(BadFrame) as caught:
        codec.unpack(frame)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    "frame",
    [
        b'"' + b'\\"' * 32_000,
        b'{"a":"' + b'\\"' * 32_000,
        b'"\\' * 21_000,
        b'"' * 65_000,
        b"[" * 65_000,
        b'{"a":' * 13_000,
        b'{"a":[' + b"1" * 4000 + b",1" * 30_000 + b"]}",
        b'{"a":"' + b"\\u0000" * 10_000 + b'"}',
        b"-" * 65_000,
    ],
)
def test_no_frame_takes_long_to_read(frame):
    assert len(frame) <= codec.HEADER_LIMIT
    begun = time.thread_time()
    with contextlib.suppress(BadFrame):
        codec.unpack(frame)
    assert time.thread_time() - begun < 1  # some of them took a minute once


def test_brackets_in_a_text_are_no_nest():
    header = {"layer": '[[[[{"\\[[[[{{{{' * 9}
    assert codec.unpack(codec.pack(header)) == header


@pytest.mark.parametrize("depth", [8, 9])
def test_a_nest_is_refused_from_its_ninth_bracket_on(depth):
    frame = b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    if depth > 8:
        with pytest.raises(BadFrame, match="nested"):
            codec.unpack(frame)
    else:
        codec.unpack(frame)


def test_infinity_in_disguise_is_refused():
    header = json.loads(codec.pack(BACKWARD).replace(b"0.5", b"1e999"))
    with pytest.raises(BadFrame):
        codec.check_message(header)


def test_a_header_is_refused_at_the_cost_of_a_header():
    worst = b'{"shape":[' + b"1," * 32_000 + b"1]}"
    tracemalloc.start()
    with pytest.raises(BadFrame):
        codec.check_message(codec.unpack(worst))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * codec.HEADER_LIMIT


def test_a_tensor_that_is_not_what_its_header_says_is_refused():
    for wrong in (None, torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)):
        with pytest.raises(BadFrame):
            codec.message_from(dict(FORWARD), wrong)
    with pytest.raises(BadFrame):
        codec.message_from(dict(FORGET), torch.zeros(1))
    with pytest.raises(BadFrame):
        codec.reply_from(dict(ANSWER), {Pass.FORWARD: torch.zeros(3)})
    with pytest.raises(BadFrame):
        codec.reply_from(dict(ANSWER), {})


def test_what_cannot_be_written_is_said():
    for header in ({"a": float("nan")}, {"a": "\ud800"}, {"a": object()}, {"a": "x" * codec.HEADER_LIMIT}):
        with pytest.raises(BadFrame):
            codec.pack(header)
    with pytest.raises(BadFrame, match="float16"):
        codec.header_of(Weights(layer="a", version=0, op=OpSpec("x"), prime=None, tensor=torch.zeros(1).half()))


@given(st.lists(NUMBERS, max_size=3000), st.integers(0, 12), st.booleans())
@settings(max_examples=20, deadline=None)
def test_what_is_to_be_forgotten_is_cut_into_messages_that_fit(calls, layers, everything):
    weights = tuple(("𝕏" * 1000, n) for n in range(layers))  # four bytes each
    parts = list(codec.parts_of(Forget(calls=tuple(calls), weights=weights, everything=everything)))
    assert all(len(codec.pack(codec.header_of(part))) <= codec.HEADER_LIMIT for part in parts)
    if everything:
        assert parts == [Forget(everything=True)]
    else:
        assert tuple(call for part in parts for call in part.calls) == tuple(calls)
        assert tuple(key for part in parts for key in part.weights) == weights


def test_chunks_cover_a_tensor_once():
    for nbytes in (0, 1, codec.CHUNK - 1, codec.CHUNK, codec.CHUNK + 1, 3 * codec.CHUNK):
        chunks = list(codec.chunks_of(nbytes))
        assert [begin for begin, _ in chunks] == list(range(0, nbytes, codec.CHUNK))
        assert sum(end - begin for begin, end in chunks) == nbytes
