"""Records and names that more than one room uses."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn


class Pass(Enum):
    """The three bilinear passes of a layer."""

    FORWARD = "forward"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"


class Secret:
    """A value that must not wander: it hides its content from repr, and refuses pickle, copies and ==."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: hidden>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is secret and cannot be pickled or copied.")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is secret and cannot be compared.")

    __hash__ = object.__hash__
