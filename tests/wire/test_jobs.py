"""Messages of the job service: whatever is sent is a message or BadFrame, and a job has one text and one name."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darknight.wire.codec import BadFrame
from darknight.wire.jobs import LARGEST, JobText, Request, dump, from_hex, load

TEXT = JobText(
    salt="01" * 32,
    client="02" * 32,
    kind="train",
    model={"name": "mlp"},
    weights=None,
    recipe={"epochs": 1},
    augment=False,
    scheme={"inputs": 1, "colluders": 1},
    leakage_budget=None,
    save_every=60.0,
    data="03" * 32,
    part="test",
    top=5,
)
REQUEST = Request(
    method="Status", nonce=b"n" * 32, sequence=3, client=b"c" * 32, body=b'{"job":"x"}', signature=b"s" * 64
)


def test_messages_come_back_as_they_were():
    assert JobText.decode(TEXT.encode()) == TEXT
    assert Request.decode("Status", REQUEST.encode()) == REQUEST


def test_a_job_has_one_name_and_another_job_another():
    assert TEXT.name == JobText.decode(TEXT.encode()).name
    assert replace(TEXT, salt="00" * 32).name != TEXT.name
    assert replace(TEXT, recipe={"epochs": 2}).name != TEXT.name


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"salt": "01"},
        {"salt": "zz" * 32},
        {"client": None},
        {"weights": "ab"},
        {"recipe": []},
        {"save_every": "1"},
        {"top": "5"},
        {"more": 1},
    ],
)
def test_a_job_that_is_not_as_it_must_be_is_refused(change):
    with pytest.raises(BadFrame):
        JobText.decode(dump({**load(TEXT.encode()), **change}))


def test_a_job_is_written_in_one_way_only():
    """Another spelling of the same values would have another name."""
    with pytest.raises(BadFrame):
        JobText.decode(json.dumps(load(TEXT.encode()), indent=1).encode())


def test_a_job_of_another_version_says_so():
    with pytest.raises(BadFrame, match="format 7"):
        JobText.decode(dump({**load(TEXT.encode()), "format": 7}))


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_no_reason_to_fall_over(data):
    for read in (load, JobText.decode, lambda raw: Request.decode("Status", raw)):
        try:
            read(data)
        except BadFrame:
            continue


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["nonce", "sequence", "client", "body", "signature", "job"]), inner, max_size=5
            )
        ),
    )
)
def test_json_of_any_kind_is_no_reason_either(value):
    data = json.dumps(value).encode()
    for read in (JobText.decode, lambda raw: Request.decode("Status", raw)):
        with pytest.raises(BadFrame):
            read(data)


def test_what_is_too_long_too_deep_or_no_number_is_refused():
    for data in (b" " * (LARGEST + 1), b"[" * 100_000, b'{"a": NaN}', b'{"a": Infinity}', b"[]", b"1"):
        with pytest.raises(BadFrame):
            load(data)
    for text in ("0", "0g", "AB", 5, None):
        with pytest.raises(BadFrame):
            from_hex(text)
