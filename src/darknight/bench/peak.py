"""How much memory the enclave takes for a step, over what the plain step takes; each in a new process of its own.

From the moment in which everything is loaded and no model is there yet, to the peak of two training steps (the second
one has momentum): weights, gradients, activations, shares, answers. Memory that is shared with workers counts in full.
Both processes keep freed memory as the command does, and run on one thread; the plain step has torch's usual layout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from darknight.bench import peak_process
from darknight.errors import DarKnightError

PLAIN, PROTECTED = "plain", "protected"
_PATIENCE = 3600.0


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes. before: of the process without a model; shared: of the peak, what workers see too, when it ended."""

    before: int
    peak: int
    shared: int

    @property
    def growth(self) -> int:
        return self.peak - self.before

    @property
    def own(self) -> int:
        """Without what is shared, which in a real enclave lies outside of it."""
        return self.growth - self.shared


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The peaks of the two processes."""

    model: str
    batch: int
    size: int
    plain: Peak
    protected: Peak

    @property
    def ratio(self) -> float:
        return self.protected.growth / self.plain.growth

    @property
    def whole(self) -> float:
        """The same of the whole processes, the interpreter and torch included."""
        return self.protected.peak / self.plain.peak

    @property
    def own(self) -> float:
        """The same without memory that is shared with workers."""
        return self.protected.own / self.plain.own

    def words(self) -> dict[str, object]:
        """For JSON."""
        peaks = {PLAIN: asdict(self.plain), PROTECTED: asdict(self.protected)}
        return {
            "batch": self.batch,
            "size": self.size,
            **peaks,
            "whole_processes": self.whole,
            "without_shared": self.own,
        }


def measure_memory(model: str, *, batch: int, size: int = 224) -> Memory:
    """One training process after the other."""
    plain, protected = (_peak(kind, model, batch, size) for kind in (PLAIN, PROTECTED))
    return Memory(model=model, batch=batch, size=size, plain=plain, protected=protected)


def _peak(kind: str, model: str, batch: int, size: int) -> Peak:
    command = [sys.executable, "-m", peak_process.__name__, kind, model, str(batch), str(size)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise DarKnightError(
            f"the {kind} step of {model} did not end in {_PATIENCE:.0f} s. Use a smaller --batch."
        ) from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise DarKnightError(
            f"the {kind} step of {model} ended with {done.returncode}; it said: {last[0]}. "
            "If memory was short, use a smaller --batch."
        )
    return Peak(**json.loads(done.stdout))
