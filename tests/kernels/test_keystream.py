"""The compiled keystream is AES-256-CTR to the byte, wherever it begins and ends."""

import subprocess
import sys

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from darknight.kernels import compiled_keystream
from darknight.kernels.compiled_keystream import fill
from kernels.guarded import PRELUDE

KINDS = ["", "aes_"]
SIZES = [0, 1, 4, 15, 16, 17, 127, 128, 129, 511, 512, 513, 4095, 4096, 4097, 9000]
FIRST = [0, 1, 12, 15, 16, 100, 4095, 1 << 36]


def of_kind(kind):
    function = compiled_keystream.chosen(kind)
    if function is None:
        pytest.skip("no compiled keystream in this installation, or no instructions for it")
    return function


def expected(key, number, first, size):
    block, skip = divmod(first, 16)
    cipher = Cipher(algorithms.AES(key), modes.CTR(number.to_bytes(8, "big") + block.to_bytes(8, "big"))).encryptor()
    return cipher.update(bytes(skip + size))[skip:]


def agree(function, size, first):
    key, number = bytes((7 * place + size) % 256 for place in range(32)), (0xFEDCBA9876543210 ^ first) % (1 << 64)
    for offset in (0, 1, 5):  # of the memory that is written to
        out = torch.full((size + 64,), 0x5A, dtype=torch.uint8)
        assert fill(function, key, number, first, out.data_ptr() + 16 + offset, size) == size
        written = out.numpy().tobytes()
        assert written[16 + offset : 16 + offset + size] == expected(key, number, first, size)
        assert set(written[: 16 + offset] + written[16 + offset + size :]) <= {0x5A}  # and nothing else


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_aes_256_in_counter_mode(kind, first, size):
    agree(of_kind(kind), size, first)


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_the_standard(kind):
    """FIPS 197, appendix C.3; its plaintext is a number and the place of a block."""
    out = torch.zeros(16, dtype=torch.uint8)
    number, block = 0x0011223344556677, 0x8899AABBCCDDEEFF
    fill(of_kind(kind), bytes(range(32)), number, 16 * block, out.data_ptr(), 16)
    assert out.numpy().tobytes().hex() == "8ea2b7ca516745bfeafc49904b496089"


@pytest.mark.parametrize("kind", KINDS)
def test_the_counter_carries_over_all_of_its_bytes(kind):
    for block in (0xFF, 0xFFFF, 0xFFFFFFFF - 3, (1 << 56) - 17, (1 << 64) - 128):
        agree(of_kind(kind), 2048, 16 * block)


GUARDED = (
    PRELUDE
    + """
from darknight.kernels import compiled_keystream

beyond = int(sys.argv[1])
for kind in ("", "aes_"):
    function = compiled_keystream.chosen(kind)
    for size in (1, 16, 100, 512, 4096, 4100):
        function(at_the_end(32), 1, 2, 7, at_the_end(size), size + beyond)
print("done")
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guarded memory is arranged for Linux")
def test_nothing_is_read_or_written_beyond_the_end(tmp_path):
    of_kind("")
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)

    def run(beyond):
        return subprocess.run([sys.executable, str(script), str(beyond)], capture_output=True, text=True, timeout=120)

    done = run(0)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert run(1).returncode < 0  # one byte further, and the process dies: the test can fail


@pytest.mark.parametrize(
    ("key", "number", "first", "size"),
    [
        (bytes(31), 0, 0, 16),
        (bytes(33), 0, 0, 16),
        (bytes(32), -1, 0, 16),
        (bytes(32), 1 << 64, 0, 16),
        (bytes(32), 0, -1, 16),
        (bytes(32), 0, 16 << 64, 16),
        (bytes(32), 0, 0, -1),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(key, number, first, size):
    out = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(ValueError, match="bytes"):
        fill(of_kind(""), key, number, first, out.data_ptr(), size)
    assert not out.any()


def test_without_the_library_or_its_instructions_there_is_none(monkeypatch):
    compiled_keystream.chosen.cache_clear()
    monkeypatch.setattr(compiled_keystream.compiled, "loaded", lambda *_: lambda *_: -1)
    assert compiled_keystream.chosen() is None
    compiled_keystream.chosen.cache_clear()
    monkeypatch.setattr(compiled_keystream.compiled, "loaded", lambda *_: None)
    assert compiled_keystream.chosen() is None
    compiled_keystream.chosen.cache_clear()
