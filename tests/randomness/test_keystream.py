"""The keystream is AES-256-CTR addressed by stream number; a number is handed out once and never to a forked child.

Contract tests of darknight.randomness.keystream, against published vectors and against the block cipher alone.
"""

import copy
import os
import pickle
import struct
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from darknight.coding.systematic import field_systematic
from darknight.errors import RandomnessError
from darknight.kernels import compiled_keystream, threads
from darknight.randomness import Randomness, Stream, distributions, grid_gaussian, uniform_below
from darknight.randomness import keystream as keystream_module
from randomness.streams import generator

SP800_38A_KEY = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"


def keystream(stream: Stream, count: int) -> bytes:
    assert count % 8 == 0
    return stream.words(count // 8, torch.int64).numpy().tobytes()


def block(key: bytes, counter: bytes) -> bytes:
    """One block of AES-256, without any mode of ours."""
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counter)


# --- known answers ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counter", "output"),
    [
        ("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", "0bdf7df1591716335e9a8b15c860c502"),
        ("f0f1f2f3f4f5f6f7f8f9fafbfcfdff00", "5a6e699d536119065433863c8f657b94"),
        ("f0f1f2f3f4f5f6f7f8f9fafbfcfdff01", "1bc12c9c01610d5d0d8bd6a3378eca62"),
        ("f0f1f2f3f4f5f6f7f8f9fafbfcfdff02", "2956e1c8693536b1bee99c73a31576b6"),
    ],
)
def test_the_block_cipher_that_we_compare_with_is_aes_256(counter, output):
    """NIST SP 800-38A, F.5.5 CTR-AES256.Encrypt: counter blocks and their output blocks."""
    assert block(bytes.fromhex(SP800_38A_KEY), bytes.fromhex(counter)).hex() == output


@pytest.mark.parametrize(
    ("key", "number", "output"),
    [
        # NIST AESAVS, KeySbox256 and VarKey256: the block of zeros, which is block 0 of stream 0.
        ("c47b0294dbbbee0fec4757f22ffeee3587ca4730c3d33b691df38bab076bc558", 0, "46f2fb342d6f0ab477476fc501242c5f"),
        ("80" + "00" * 31, 0, "e35a6dcb19b201a01ebcfa8aa22b5759"),
        # NIST AESAVS, VarTxt256: key zero; the plaintext is the counter block, stream number first, big-endian.
        ("00" * 32, 1 << 63, "ddc6bf790c15760d8d9aeb6f9a75fd4e"),
        ("00" * 32, 3 << 62, "0a6bdc6d4c1e6280301fd8e97ddbe601"),
    ],
)
def test_the_first_block_of_a_stream_is_nists_answer(key, number, output, maker):
    assert keystream(Stream(bytes.fromhex(key), number), 16).hex() == output


@pytest.mark.parametrize("number", [0, 1, 255, 256, 0x0102030405060708, 2**64 - 1])
def test_a_stream_encrypts_its_number_followed_by_a_block_counter_both_big_endian(number, maker):
    key = bytes.fromhex(SP800_38A_KEY)
    blocks = 260  # the counter's second byte moves too
    expected = b"".join(block(key, struct.pack(">QQ", number, place)) for place in range(blocks))
    assert keystream(Stream(key, number), 16 * blocks) == expected


@pytest.fixture
def several(monkeypatch):
    """Reads of any size are worth a thread, of which torch has as many as the test says."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_EACH", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


READS = [40_004, 1, 3, 4096, 1025, 70_001, 2, 16_384]  # numbers of four bytes: most do not end with a block


def read_in_turn(key: bytes, number: int) -> bytes:
    stream = Stream(key, number)
    return b"".join(stream.words(count, torch.int32).numpy().tobytes() for count in READS)


@pytest.fixture(params=["compiled", "library"])
def maker(request, monkeypatch):
    """Who makes the keystream."""
    if request.param == "library":
        monkeypatch.setattr(compiled_keystream, "chosen", lambda: None)
    elif compiled_keystream.chosen() is None:
        pytest.skip("no compiled keystream in this installation, or no instructions for it")
    return request.param


def test_several_threads_read_the_bytes_that_one_reads(several, monkeypatch, maker):
    key, number, parts = bytes.fromhex(SP800_38A_KEY), 0x0102030405060708, []
    part = keystream_module._fill

    def counted(key: bytes, number: int, at: int, *where: object):
        parts.append(at)
        return part(key, number, at, *where)

    monkeypatch.setattr(keystream_module, "_fill", counted)
    several(1)
    alone = read_in_turn(key, number)
    assert parts == [4 * sum(READS[:place]) for place in range(len(READS))]
    blocks = -(-len(alone) // 16)
    expected = b"".join(block(key, struct.pack(">QQ", number, place)) for place in range(blocks))
    assert alone == expected[: len(alone)]
    for count in (2, 3, 7):
        several(count)
        parts.clear()
        assert read_in_turn(key, number) == alone
        assert len(parts) >= count  # it did use them
    monkeypatch.setattr(keystream_module, "_fill", lambda key, number, at, *where: part(key, number, at + 16, *where))
    assert read_in_turn(key, number) != alone  # a part one block further, and it is noticed: the test can fail


def test_a_stream_that_was_interrupted_is_not_read_again(several, monkeypatch):
    """Its parts may have come to different places: what is read next could be read twice."""
    several(3)
    stream = Stream(bytes(32), 1)
    stream.words(4, torch.int32)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(keystream_module, "_fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.words(40_000, torch.int32)
    with pytest.raises(RandomnessError, match="interrupted"):
        stream.words(4, torch.int32)
    assert len(stream.words(0, torch.int32)) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_words_are_read_once_from_front_to_back_however_they_are_asked_for(dtype, maker):
    key = bytes(range(32))
    whole = keystream(Stream(key, 5), 4096)
    stream = Stream(key, 5)
    pieces = [stream.words(count, dtype) for count in (1, 0, 2, 3, 7, 100)]  # within and across blocks
    read = b"".join(piece.numpy().tobytes() for piece in pieces)
    assert read == whole[: len(read)]
    assert all(piece.dtype == dtype for piece in pieces)


def test_memory_with_gaps_is_refused_before_anything_is_read(maker):
    stream, apart = Stream(bytes(32), 1), torch.zeros(8, 2, dtype=torch.int32)[:, 0]
    with pytest.raises(RandomnessError, match="without gaps"):
        stream.words(8, torch.int32, out=apart)
    assert not apart.any()
    assert torch.equal(stream.words(8, torch.int32), Stream(bytes(32), 1).words(8, torch.int32))


def test_a_read_longer_than_the_kept_zeros_is_still_the_keystream(maker):
    key = bytes(range(32))
    words = Stream(key, 1).words(3 << 18, torch.int64)  # 6 MiB, in one call
    last = len(words) // 2 - 1
    assert words[-2:].numpy().tobytes() == block(key, struct.pack(">QQ", 1, last))


def test_a_read_hands_out_its_own_memory():
    stream = generator("memory").fresh()
    first = stream.words(64, torch.int32)
    kept = first.clone()
    stream.words(64, torch.int32).zero_()
    assert torch.equal(first, kept)


# --- numbers ----------------------------------------------------------------------------------------------------------
def test_fresh_counts_up_and_different_numbers_share_no_block():
    owner = generator("numbers")
    streams = [owner.fresh() for _ in range(50)]
    assert [stream.number for stream in streams] == list(range(50))
    blocks = [data[i : i + 16] for stream in streams for data in [keystream(stream, 1600)] for i in range(0, 1600, 16)]
    assert len(set(blocks)) == len(blocks)


class SlowNumber(int):
    """A counter whose increment lets every other thread run first, so that a missing lock cannot go unnoticed."""

    def __add__(self, other):
        time.sleep(1e-4)
        return SlowNumber(int(self) + other)


def numbers_drawn_by_threads(owner: Randomness, threads: int = 8, each: int = 40) -> list[int]:
    owner._next = SlowNumber(0)
    drawn: list[int] = []
    start = threading.Barrier(threads)

    def draw():
        start.wait()
        drawn.extend(int(owner.fresh().number) for _ in range(each))

    team = [threading.Thread(target=draw) for _ in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return drawn


def test_threads_never_draw_the_same_number():
    assert sorted(numbers_drawn_by_threads(generator("threads"))) == list(range(320))


def test_without_the_lock_threads_would_draw_the_same_number():
    owner = generator("threads")
    owner._lock = nullcontext()
    drawn = numbers_drawn_by_threads(owner)
    assert len(set(drawn)) < len(drawn)


def test_the_last_number_is_used_and_then_no_more():
    owner = generator("end")
    owner._next = (1 << 64) - 1
    assert owner.fresh().number == (1 << 64) - 1
    with pytest.raises(RandomnessError, match=r"2\^64 streams are used"):
        owner.fresh()


def test_generators_from_the_operating_system_differ():
    first, second = (keystream(Randomness.from_operating_system().fresh(), 64) for _ in range(2))
    assert first != second


@pytest.mark.parametrize("length", [0, 16, 24, 31, 33, 64])
def test_a_key_of_another_length_is_refused(length):
    with pytest.raises(RandomnessError, match=f"key of {length} bytes; AES-256 needs 32"):
        Randomness(bytes(length))


# --- replay -----------------------------------------------------------------------------------------------------------
def test_replay_gives_the_same_bytes_from_the_start():
    owner = generator("replay")
    streams = [owner.fresh() for _ in range(4)]
    originals = [keystream(stream, 800) for stream in streams]
    for stream, original in zip(streams, originals, strict=True):
        assert keystream(owner.replay(stream.number), 800) == original
    noise = uniform_below(owner.fresh(), (3, 70), 1000)
    assert torch.equal(uniform_below(owner.replay(4), (3, 70), 1000), noise)


def test_replay_uses_up_no_number():
    owner = generator("replay")
    owner.fresh()
    owner.replay(0)
    assert owner.fresh().number == 1


@pytest.mark.parametrize("number", [-1, 3, 4, 1 << 64])
def test_a_number_that_was_never_drawn_cannot_be_replayed(number):
    owner = generator("replay")
    for _ in range(3):
        owner.fresh()
    with pytest.raises(RandomnessError, match="never drawn"):
        owner.replay(number)


# --- fork -------------------------------------------------------------------------------------------------------------
def outcome_in_a_forked_child(action) -> str:
    """What happens when `action` runs in a real child of fork: "drew", "refused", or another exception's name."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            said = "drew"
        except RandomnessError as error:
            said = "refused" if "forked" in str(error) else repr(error)
        except BaseException as error:
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_can_neither_draw_nor_replay():
    owner = generator("fork")
    drawn_before = owner.fresh()
    assert outcome_in_a_forked_child(owner.fresh) == "refused"
    assert outcome_in_a_forked_child(lambda: drawn_before.words(4, torch.int32)) == "refused"
    assert outcome_in_a_forked_child(lambda: owner.replay(0)) == "refused"
    assert owner.fresh().number == 1  # the parent goes on


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_may_make_its_own_generator():
    assert outcome_in_a_forked_child(lambda: Randomness.from_operating_system().fresh()) == "drew"


# --- secrets ----------------------------------------------------------------------------------------------------------
def secrets() -> dict[str, object]:
    code = field_systematic(3, 1, 1, 2**25 - 39, True)
    owner = Randomness(bytes.fromhex(SP800_38A_KEY))
    return {"Randomness": owner, "Stream": owner.fresh(), "Mixing": code.A, "Code": code}


@pytest.mark.parametrize("kind", secrets())
class TestASecret:
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_refuses_pickle(self, kind, protocol):
        for wrapped in (secrets()[kind], [secrets()[kind]], {"a": secrets()[kind]}):
            with pytest.raises(TypeError, match=f"{kind} is secret and cannot be pickled"):
                pickle.dumps(wrapped, protocol)

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
    def test_refuses_copies(self, kind, duplicate):
        with pytest.raises(TypeError, match=f"{kind} is secret"):
            duplicate(secrets()[kind])

    def test_shows_nothing(self, kind):
        secret = secrets()[kind]
        for text in (repr(secret), str(secret), f"{secret}", f"{secret!r}", f"{[secret]}"):
            assert text.strip("[]") == f"<{kind}: hidden>"

    def test_refuses_comparison(self, kind):
        secret, other = secrets()[kind], secrets()[kind]
        for compare in (
            lambda: secret == other,
            lambda: secret != other,
            lambda: secret == secret,
            lambda: secret == 1,
        ):
            with pytest.raises(TypeError, match=f"{kind} is secret and cannot be compared"):
                compare()


def test_an_error_about_a_key_does_not_show_it():
    with pytest.raises(RandomnessError) as caught:
        Randomness(b"s3cret-key-material")
    assert "s3cret" not in str(caught.value)


# --- memory -----------------------------------------------------------------------------------------------------------
def test_a_buffer_that_is_not_filled_is_never_handed_out(monkeypatch, maker):
    """Too few zeros to encrypt, as a race between threads could give: the rest would be old memory, not keystream."""
    if maker == "library":
        monkeypatch.setattr("darknight.randomness.keystream._zeros", lambda count: memoryview(bytes(count // 2)))
    else:
        monkeypatch.setattr(compiled_keystream, "fill", lambda *_: 50)
    with pytest.raises(RandomnessError, match="did not fill"):
        generator("short").fresh().words(100, torch.int32)


def test_a_smaller_buffer_of_another_thread_does_not_shorten_ours(monkeypatch):
    """Another thread replaces the shared zeros between the size check and their use."""
    real_zeros = np.zeros

    def interrupted(count, dtype):
        made = real_zeros(count, dtype=dtype)
        keystream_module._zero_bytes = real_zeros(16, dtype=dtype)  # the other thread
        return made

    monkeypatch.setattr(keystream_module, "_zero_bytes", real_zeros(16, dtype=np.uint8))
    monkeypatch.setattr(keystream_module.np, "zeros", interrupted)
    assert len(keystream_module._zeros(5000)) == 5000


def test_draws_in_inference_mode_leave_nothing_behind():
    """The kept buffer must not become an inference tensor, which could not be written outside that mode."""
    distributions._scratch.buffer = distributions._scratch.buffer[:0]  # as in a new thread
    with torch.inference_mode():
        grid_gaussian(generator("inference").fresh(), (300,), 1e3)
    grid_gaussian(generator("inference").fresh(), (300,), 1e3)
