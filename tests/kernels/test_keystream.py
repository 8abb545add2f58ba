"""The compiled keystream is AES-256-CTR to the byte, wherever it begins and ends."""

import shutil
import subprocess
import sys
from pathlib import Path

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
    for block in (0xFF, 0xFFFF, 0xFFFFFFFF - 3, (1 << 56) - 17, (1 << 63) - 2, (1 << 64) - 128):
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
        (bytes(32), 0, (16 << 64) - 15, 16),
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


# Calls both functions and says in how many registers a part of the key is left.
LEFT = """
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#define KEEP(n) "movdqu %%xmm" #n ", 16*" #n "(%0)\\n\\t"
#define KEEP_WIDE(n) "vmovdqu64 %%zmm" #n ", 64*" #n "(%0)\\n\\t"
#define EIGHT(keep) keep(0) keep(1) keep(2) keep(3) keep(4) keep(5) keep(6) keep(7)
#define SIXTEEN(keep) EIGHT(keep) keep(8) keep(9) keep(10) keep(11) keep(12) keep(13) keep(14) keep(15)
#define UPPER(keep) keep(16) keep(17) keep(18) keep(19) keep(20) keep(21) keep(22) keep(23) \\
    keep(24) keep(25) keep(26) keep(27) keep(28) keep(29) keep(30) keep(31)
typedef int64_t function(const uint8_t *, uint64_t, uint64_t, int64_t, uint8_t *, int64_t);
function darknight_keystream_1, darknight_keystream_aes_1;
static uint8_t kept[64 * 32], out[4096], key[32];

static int left(function *make) {
    const int wide = __builtin_cpu_supports("avx512f");
    int found = 0;
    make(key, 1, 0, 0, out, sizeof out);
    if (wide) __asm__ volatile(SIXTEEN(KEEP_WIDE) UPPER(KEEP_WIDE) : : "r"(kept) : "memory");
    else __asm__ volatile(SIXTEEN(KEEP) : : "r"(kept) : "memory");
    for (int i = 0; i < (wide ? 64 * 32 : 16 * 16); i += 16)
        found += !memcmp(kept + i, key, 16) + !memcmp(kept + i, key + 16, 16);
    return found;
}

int main(void) {
    for (int i = 0; i < 32; i++) key[i] = (uint8_t)(0xA0 + i);
    printf("%d\\n", left(darknight_keystream_1) + left(darknight_keystream_aes_1));
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: nothing was compiled")
def test_no_register_keeps_a_part_of_the_key(tmp_path):
    of_kind("")
    source = Path(compiled_keystream.__file__).with_name("keystream.c").read_text()

    def left(text):
        (tmp_path / "keystream.c").write_text(text)
        (tmp_path / "left.c").write_text(LEFT)
        files = [str(tmp_path / name) for name in ("left.c", "keystream.c")]
        subprocess.run(["cc", "-O3", "-o", str(tmp_path / "left"), *files], check=True)
        return int(subprocess.run([tmp_path / "left"], capture_output=True, text=True, check=True).stdout)

    assert left(source) == 0
    if compiled_keystream.chosen() is not None and "avx512f" in Path("/proc/cpuinfo").read_text():
        careless = source.replace("vzeroall", "vzeroupper").replace("vpxorq %%zmm", "# %%zmm")
        assert careless != source
        assert left(careless) > 0  # nobody wipes them, and it is noticed: the test can fail
