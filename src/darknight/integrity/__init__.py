"""Checks of what workers return. A check raises or gives back the verified result; it never returns a verdict.

Freivalds' check in the field: `verified_*` of integers, `agree_*` of results that were weighed while they were decoded,
as `weighing_for` says. `real` has the same for Real arithmetic, and how large an honest error is; `parity` compares
redundant answers, in both. `blame` is no check: it says whose answer is wrong, when one is.
"""

from darknight.integrity import blame, parity, real
from darknight.integrity.blame import Given
from darknight.integrity.freivalds import (
    agree_forward,
    agree_grad_input,
    agree_grad_weight,
    verified_forward,
    verified_grad_input,
    verified_grad_weight,
)
from darknight.integrity.weighed import (
    Weighed,
    gradient_weighed_as,
    weighed_as,
    weighing_for,
    weighing_for_gradient,
)
from darknight.integrity.weighing import Integers, Rounded

__all__ = [
    "Given",
    "Integers",
    "Rounded",
    "Weighed",
    "agree_forward",
    "agree_grad_input",
    "agree_grad_weight",
    "blame",
    "gradient_weighed_as",
    "parity",
    "real",
    "verified_forward",
    "verified_grad_input",
    "verified_grad_weight",
    "weighed_as",
    "weighing_for",
    "weighing_for_gradient",
]
