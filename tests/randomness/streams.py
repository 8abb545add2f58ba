"""Keys and streams that only a test may have: fixed keys, scripted words, and broken counters."""

import hashlib

import torch

from darknight.randomness import Randomness, Stream


def generator(label: str) -> Randomness:
    """A generator whose key is derived from the test's own label, so that the test is the same every time."""
    return Randomness(hashlib.sha256(f"darknight/tests/{label}".encode()).digest())


class Scripted:
    """A stream whose words are chosen by the test. Running out of words is an error; words may be left over."""

    def __init__(self, words) -> None:
        self._words = torch.as_tensor(words, dtype=torch.int64)

    def words(self, count: int, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        taken, self._words = self._words[:count], self._words[count:]
        assert len(taken) == count, "the script has too few words"
        return taken.to(dtype, copy=True) if out is None else out.copy_(taken)

    key = bytes(32)  # of nothing: nobody could make the script from it

    def branches(self, count: int) -> list["Scripted"]:
        """The script goes on from one row to the next."""
        return [self] * count


class ReusedCounter:
    """Broken on purpose: after `period` bytes the counter starts again, so the same keystream comes back."""

    def __init__(self, stream: Stream, period: int) -> None:
        self._bytes = stream.words(period // 8, torch.int64).view(torch.uint8)
        self._place = 0

    def words(self, count: int, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        index = (self._place + torch.arange(count * dtype.itemsize)) % len(self._bytes)
        self._place += count * dtype.itemsize
        words = self._bytes[index].view(dtype)
        return words if out is None else out.copy_(words)
