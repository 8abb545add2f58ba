"""One piece of sealed data: whole, in its order, under its key and its label, or not at all."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darknight.errors import TrustError
from darknight.trust import blob
from darknight.trust.blob import open_bytes, seal_bytes, sealed_size
from darknight.trust.key_file import DataKey

KEY = DataKey.fresh()
CHUNK, BEGIN = 64, 4 + 32


@pytest.fixture
def small_chunks(monkeypatch):
    """So that a few hundred bytes have several."""
    monkeypatch.setattr(blob, "_CHUNK", CHUNK)


def sealed(data, label=b"job 7, step 3"):
    return seal_bytes(KEY, data, label=label)


def opened(content, label=b"job 7, step 3"):
    return open_bytes(KEY, content, label=label)


def chunks(content):
    body = content[BEGIN:]
    return content[:BEGIN], [body[at : at + CHUNK + 16] for at in range(0, len(body), CHUNK + 16)]


SIZES = [0, 1, 63, 64, 65, 127, 128, 129, 300]


@pytest.mark.parametrize("size", SIZES)
def test_what_went_in_comes_out(size, small_chunks):
    data = os.urandom(size)
    content = sealed(data)
    assert len(content) == sealed_size(size)
    for form in (content, bytearray(content), memoryview(content)):
        assert opened(form) == data


@pytest.mark.parametrize("size", [0, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_so_it_does_at_its_real_size(size):
    data = os.urandom(size)
    assert opened(sealed(data)) == data
    assert opened(sealed(memoryview(data))) == data


@given(st.binary(max_size=400))
@settings(max_examples=50, deadline=None)
def test_whatever_it_is(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blob, "_CHUNK", CHUNK)
        assert opened(sealed(data)) == data


def test_another_key_or_another_label_opens_nothing():
    content = sealed(b"weights")
    with pytest.raises(TrustError, match="key or the label") as refusal:
        open_bytes(DataKey.fresh(), content, label=b"job 7, step 3")
    assert refusal.value.check == "sealed"
    for label in (b"", b"job 7, step 4", b"job 7, step 3\0", b"job 7, step "):
        with pytest.raises(TrustError):
            opened(content, label=label)


@pytest.mark.parametrize("size", SIZES)
def test_every_shorter_or_longer_one_is_refused(size, small_chunks):
    content = sealed(os.urandom(size))
    for length in range(len(content)):
        with pytest.raises(TrustError):
            opened(content[:length])
    for more in (b"\0", bytes(16), bytes(CHUNK + 16), content[BEGIN:], content):
        with pytest.raises(TrustError):
            opened(content + more)


@pytest.mark.parametrize("size", [0, 65, 200])
def test_every_flipped_bit_is_refused(size, small_chunks):
    content = sealed(os.urandom(size))
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            with pytest.raises(TrustError):
                opened(changed)


def test_a_shorter_length_that_looks_whole_is_refused(small_chunks, monkeypatch):
    """Ends where a chunk ends: only the mark of the last one shows that something is missing."""
    content = sealed(os.urandom(3 * CHUNK))
    begin, parts = chunks(content)
    assert len(parts) == 3
    for kept in (1, 2):
        with pytest.raises(TrustError):
            opened(begin + b"".join(parts[:kept]))
    # The control: without the mark it passes.
    monkeypatch.setattr(blob, "_associated", lambda index, chunks: index.to_bytes(8, "big") + b"\0")
    begin, parts = chunks(sealed(os.urandom(3 * CHUNK)))
    assert len(opened(begin + b"".join(parts[:2]))) == 2 * CHUNK


def test_chunks_in_another_order_are_refused(small_chunks, monkeypatch):
    data = os.urandom(4 * CHUNK)
    begin, (a, b, c, d) = chunks(sealed(data))
    assert opened(begin + a + b + c + d) == data
    for parts in ((b, a, c, d), (a, a, c, d), (a, c, b, d), (d, b, c, a), (a, b, c, c)):
        with pytest.raises(TrustError):
            opened(begin + b"".join(parts))
    # The control: without the index it passes.
    monkeypatch.setattr(blob, "_associated", lambda index, chunks: bytes([index == chunks - 1]))
    monkeypatch.setattr(blob, "nonce_of", lambda index: bytes(12))
    begin, (a, b, c, d) = chunks(sealed(data))
    assert opened(begin + b + a + c + d) != data


def test_chunks_of_two_blobs_do_not_mix(small_chunks, monkeypatch):
    """Under one key, one label, for the same data: each has a key of its own."""
    data = os.urandom(2 * CHUNK)
    (begin, (a, b)), (other_begin, (other_a, other_b)) = chunks(sealed(data)), chunks(sealed(data))
    for content in (begin + other_a + b, begin + a + other_b, other_begin + a + b):
        with pytest.raises(TrustError):
            opened(content)
    # The control: with the same salt it passes.
    monkeypatch.setattr(blob, "fresh_nonce", lambda: bytes(32))
    (begin, (_, b)), (_, (other_a, _)) = chunks(sealed(data)), chunks(sealed(data[::-1]))
    opened(begin + other_a + b)


def test_the_same_data_under_the_same_label_looks_unrelated():
    first, second = sealed(bytes(10_000)), sealed(bytes(10_000))
    assert first[:4] == second[:4]
    assert sum(a == b for a, b in zip(first[4:], second[4:], strict=True)) < 120


def test_a_label_cannot_run_into_another():
    """Its length is in front of it, so no two labels give one key."""
    assert len({blob._info(label) for label in (b"", b"\0", b"a", b"ab", b"\0\0\0\0\0\0\0\1a")}) == 5


@pytest.mark.parametrize("content", [b"", b"DKB1", b"DKBX" + bytes(100), bytes(100), b"DKB1" + bytes(47)])
def test_something_else_is_refused_in_words(content):
    with pytest.raises(TrustError, match="of another kind or version"):
        opened(content)
