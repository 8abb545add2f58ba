"""Checks of what workers return. A check raises or gives back the verified result; it never returns a verdict.

The three functions are Freivalds' check in the field. `real` has the same for Real arithmetic, and how large an honest
error is; `parity` compares redundant answers, in both. `blame` is no check: it says whose answer is
wrong, when one is.
"""

from darknight.integrity import blame, parity, real
from darknight.integrity.blame import Given
from darknight.integrity.freivalds import verified_forward, verified_grad_input, verified_grad_weight

__all__ = ["Given", "blame", "parity", "real", "verified_forward", "verified_grad_input", "verified_grad_weight"]
