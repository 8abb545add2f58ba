"""How much memory one enclave's session may use, counted before it is used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from darknight.errors import OpError

# What a kept tensor costs beside its bytes: the records and names around it. It also bounds how many there can be.
OVERHEAD = 4096

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Budget:
    """Counts what arrives, what is kept (by key) and what a computation needs, against one limit.

    Guarantees: what was granted never sums up to more than `limit`. Every request that does not fit raises OpError,
    before anything was allocated, in words for the enclave's owner and the worker's operator. `make_room` is called
    with the size of what was granted before it is allocated. Contract tests: tests/worker/test_budget.py.
    Assumes: that whoever asks tells the truth about sizes: the reader asks with the header's size and allocates that,
    and darknight.ops.estimate is an upper bound of what a computation takes (tests/ops/test_estimate.py).
    """

    def __init__(self, limit: int | None = None, make_room: Callable[[int], None] | None = None) -> None:
        self.limit = limit
        self._make_room = make_room
        self._lock = threading.Lock()
        self._arriving = 0
        self._kept: dict[Hashable, int] = {}
        self._held = 0
        self._working = 0

    @property
    def held(self) -> int:
        """Bytes of weights and shares that are kept."""
        return self._held

    def admit(self, nbytes: int) -> None:
        """Room for the one tensor that is about to be read; `arrived`, or the next one, ends the claim."""
        with self._lock:
            self._arriving = 0  # of a message that could not be read after all
            self._check(nbytes, "this message")
            self._arriving = nbytes
        self._prepare(nbytes)

    def arrived(self, nbytes: int) -> None:
        """A message was read. From now on its tensor counts as kept, as a part of a computation, or not at all."""
        with self._lock:
            self._arriving = max(0, self._arriving - nbytes)  # tensors that need no memory of ours were never admitted

    def keep(self, key: Hashable, nbytes: int) -> None:
        """Counts a tensor as kept, in the place of what was kept under the same key."""
        cost = nbytes + OVERHEAD
        with self._lock:
            self._check(cost - self._kept.get(key, 0), "what it has to keep")
            self._held += cost - self._kept.get(key, 0)
            self._kept[key] = cost

    def release(self, key: Hashable) -> None:
        """What was kept under this key is gone; unknown keys do no harm."""
        with self._lock:
            self._held -= self._kept.pop(key, 0)

    def release_all(self) -> None:
        with self._lock:
            self._kept.clear()
            self._held = 0
            self._arriving = 0

    @contextmanager
    def working(self, nbytes: int) -> Iterator[None]:
        """Room for a computation and its results, while the block runs."""
        with self._lock:
            self._check(nbytes, "the computation and its results")
            self._working += nbytes
        try:
            self._prepare(nbytes)
            yield
        finally:
            with self._lock:
                self._working -= nbytes

    def _prepare(self, nbytes: int) -> None:
        if self._make_room is not None:
            self._make_room(nbytes)

    def _check(self, nbytes: int, what: str) -> None:
        if self.limit is None:
            return
        free = self.limit - self._arriving - self._held - self._working
        if nbytes > free:
            raise OpError(
                f"no room: {what} needs {size_in_words(nbytes)} and {size_in_words(max(0, free))} of this enclave's "
                f"{size_in_words(self.limit)} are free. Use smaller batches, or ask the worker's operator for a larger "
                "--memory-limit or fewer --enclaves."
            )


def size_in_words(nbytes: int) -> str:
    for unit in reversed(_UNITS):
        if abs(nbytes) >= _UNITS[unit] and unit != "B":
            return f"{nbytes / _UNITS[unit]:.1f} {unit}"
    return f"{nbytes} B"


def size_from(text: str) -> int:
    """Bytes of "8GiB", "512MiB", "1.5 GiB" or "1000000"; raises ValueError in words."""
    stripped = text.strip()
    unit = next((unit for unit in reversed(_UNITS) if stripped.endswith(unit)), "")
    number = stripped.removesuffix(unit).strip()
    try:
        size = int(float(number) * _UNITS[unit or "B"])
    except (ValueError, OverflowError):
        raise ValueError(f'"{text[:40]}" is not a size. Write a number and a unit, such as 512MiB or 8GiB.') from None
    if size < 1:
        raise ValueError(f'"{text[:40]}" is no room at all. Write a number and a unit, such as 512MiB or 8GiB.')
    return size
