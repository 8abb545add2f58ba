"""One attack of the suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from darknight.audit.finding import Finding
from darknight.audit.scene import Scene


@dataclass(frozen=True, kw_only=True)
class Attack:
    """key: its name at the command line. question: what a reviewer asks. how: how it works, in two sentences.

    what_to_do: what the findings mean for whoever runs a training. `run` gives at least one finding, and for everything
    that must fail a control that must succeed.
    """

    key: str
    title: str
    question: str
    how: str
    what_to_do: str
    run: Callable[[Scene], Sequence[Finding]]
