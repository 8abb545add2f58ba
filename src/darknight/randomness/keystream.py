"""AES-256-CTR, addressed by stream number."""

from __future__ import annotations

import os
import threading
from functools import partial

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from darknight.errors import RandomnessError
from darknight.kernels import compiled_keystream, threads
from darknight.kernels.compiled_keystream import BLOCK, KEY_BYTES
from darknight.types import Secret

_STREAMS = 1 << 64
_STEP = 4096  # bytes, whole blocks, at whose multiples threads divide what is read


class Randomness(Secret):
    """A keyed family of 2^64 independent streams.

    Guarantees: no two calls of `fresh` share a byte of keystream, across threads and across the life of the object; a
        process that was forked from the owner cannot draw (it would repeat the parent's noise). Contract test:
        tests/randomness/test_keystream.py.
    Assumes: AES-256 is a pseudo-random permutation, the operating system's generator is sound, and one stream yields
        fewer than 2^64 blocks. The streams are told from uniform with advantage at most about n^2 / 2^129 after n
        blocks.
    Leaks: nothing to workers. The key stays in this process's memory; Python cannot erase it.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise RandomnessError(f"key of {len(key)} bytes; AES-256 needs {KEY_BYTES}.")
        self._key = key
        self._next = 0
        self._lock = threading.Lock()
        self._process = os.getpid()

    @classmethod
    def from_operating_system(cls) -> Randomness:
        return cls(os.urandom(KEY_BYTES))

    def fresh(self) -> Stream:
        """The next stream that nobody has used."""
        _refuse_other_process(self._process)
        with self._lock:
            if self._next == _STREAMS:
                raise RandomnessError("all 2^64 streams are used. Make a new generator.")
            number, self._next = self._next, self._next + 1
        return Stream(self._key, number)

    def replay(self, number: int) -> Stream:
        """An earlier stream again from its start, to reproduce a share; never to mask anything new."""
        _refuse_other_process(self._process)
        if not 0 <= number < self._next:
            raise RandomnessError(f"stream {number} was never drawn, so it cannot be replayed.")
        return Stream(self._key, number)


class Stream(Secret):
    """The keystream of one stream number, read once from front to back.

    The initial counter block is the number followed by a 64-bit block counter, both big-endian. So what begins anywhere
    can be made by another thread, with the bytes that it would have had. Where the processor has instructions for AES a
    kernel of our own makes it (docs/adr/0043), else a library.
    """

    def __init__(self, key: bytes, number: int) -> None:
        self.number = number
        self._key = key
        self._process = os.getpid()
        self._read = [0]  # bytes; nothing while somebody reads, and ever after if that was interrupted

    def words(self, count: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The next `count` words of the keystream as int32 or int64, in `out` where that is given."""
        _refuse_other_process(self._process)
        words = torch.empty(count, dtype=dtype) if out is None else out
        if not count:
            return words
        if words.numel() != count or words.dtype != dtype:
            raise RandomnessError(f"out has {words.numel()} numbers of {words.dtype}; needs {count} of {dtype}.")
        if not words.is_contiguous() or not words.is_cpu:
            raise RandomnessError("the keystream is written to memory without gaps, on a processor.")
        try:
            read = self._read.pop()  # until all of it is there: no byte is read twice, whatever happens
        except IndexError:
            raise RandomnessError(
                "this stream was interrupted, or another thread reads it. Draw from a fresh one."
            ) from None
        size = words.nbytes
        threads.split(partial(_fill, self._key, self.number, read, words), size, size // 4, _STEP)
        self._read.append(read + size)
        return words

    def branches(self, count: int) -> list[Branch]:
        """So many streams with keys of their own, which are the next bytes of this one.

        Guarantees: who has the key of a branch has that branch, and learns nothing about another, about this stream or
            about the key of its family. Contract test: tests/randomness/test_branches.py.
        Assumes: AES-256 is a pseudo-random permutation: the keys are what it makes of places that nothing else uses.
        """
        keys = self.words(count * KEY_BYTES // 8, torch.int64).numpy().tobytes()
        return [Branch(keys[begin : begin + KEY_BYTES]) for begin in range(0, len(keys), KEY_BYTES)]


class Branch(Stream):
    """A stream whose key may be given away, to somebody who is to know all of it."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key, 0)
        self.key = key


def _fill(key: bytes, number: int, at: int, words: Tensor, first: int, last: int) -> None:
    """The bytes of `words`, from `first` to `last`, become those of a stream from `at` on."""
    function = compiled_keystream.chosen()
    if function is not None:
        made = compiled_keystream.fill(function, key, number, at + first, words.data_ptr() + first, last - first)
    else:
        block, skip = divmod(at + first, BLOCK)
        counter = number.to_bytes(8, "big") + block.to_bytes(8, "big")
        cipher = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
        cipher.update(bytes(skip))
        made = cipher.update_into(_zeros(last - first), words.numpy().data.cast("B")[first:last])
    if made != last - first:
        raise RandomnessError("the keystream did not fill its buffer; nothing may be masked with it.")


def _refuse_other_process(owner: int) -> None:
    if os.getpid() != owner:
        raise RandomnessError(
            "this process was forked from the generator's owner and would repeat its noise. "
            "Make a new generator after the fork."
        )


_zero_bytes = np.zeros(1 << 20, dtype=np.uint8)


def _zeros(count: int) -> memoryview:
    """Zeros to encrypt. The array is never written, so its pages are all the kernel's one zero page."""
    global _zero_bytes
    zeros = _zero_bytes  # another thread may replace it by a smaller one at any moment
    if zeros.size < count:
        zeros = _zero_bytes = np.zeros(count, dtype=np.uint8)
    return zeros.data[:count]
