"""Where the enclave's time goes: seconds of the processor by layer and phase, while somebody measures.

    with measured() as phases:
        ... a training step ...
    phases.seconds                                  # {("features.0", "encode"): 0.0012, ...}

Only the thread that measures is measured. What a phase calls that is a phase of its own counts there. While nobody
measures, a phase costs a look at one variable.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

OUTSIDE = ""  # the layer and phase of what happens between layer calls


class Phases:
    """Seconds of one thread, from its making on."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._now = (OUTSIDE, OUTSIDE)
        self._since = time.thread_time()

    def switch(self, layer: str | None, phase: str) -> tuple[str, str]:
        """What follows is this phase, of the same layer if none is named. Returns what it was until now."""
        now, before = time.thread_time(), self._now
        self.seconds[before] += now - self._since
        self._now, self._since = (before[0] if layer is None else layer, phase), now
        return before


_current: ContextVar[Phases | None] = ContextVar("darknight_phases", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()


def phase(name: str, layer: str | None = None) -> AbstractContextManager[None]:
    """What is done inside counts as `name`: of `layer`, or of the layer whose call this is part of."""
    phases = _current.get()
    return _NOTHING if phases is None else _Inside(phases, name, layer)


class _Inside:
    """A context, of which a step has thousands."""

    __slots__ = ("_before", "_layer", "_name", "_phases")

    def __init__(self, phases: Phases, name: str, layer: str | None) -> None:
        self._phases, self._name, self._layer = phases, name, layer

    def __enter__(self) -> None:
        self._before = self._phases.switch(self._layer, self._name)

    def __exit__(self, *_: object) -> None:
        self._phases.switch(*self._before)


@contextmanager
def measured() -> Iterator[Phases]:
    """Measures this thread while it is open."""
    phases = Phases()
    token = _current.set(phases)
    try:
        yield phases
    finally:
        _current.reset(token)
        phases.switch(OUTSIDE, OUTSIDE)
